"""Sequence: one branch of a request being generated, and its block table."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from .messages import Branch, FinishReason, Request
from .prefix_cache import CacheNode, ExtraKeys
from .routing_hash import HashState, RoutingHasher


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """``token_ids`` is prompt and output; the first ``num_computed_tokens`` of it have K and V in the block table."""

    request: Request
    branch: int
    token_ids: array[int]
    num_prompt_tokens: int
    arrival: int
    """Counts arrivals at this engine; breaks ties of priority."""
    deadline_s: float | None
    """On the engine's clock."""
    block_table: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when first admitted."""
    num_preemptions: int = 0
    slot: int | None = None
    num_sent_blocks: int = 0
    """Entries of the block table that the ranks know."""
    cache_tail: CacheNode | None = None
    """Node of the last full block that the prefix cache knows of this sequence."""
    num_stored_blocks: int = 0
    hash_state: HashState | None = None
    """Where the routing hash stands, once it is needed beyond the prompt."""

    @classmethod
    def start(cls, request: Request, branch: Branch, *, arrival: int, now: float) -> Sequence:
        """A waiting sequence that goes on where ``branch`` stopped."""
        return cls(
            request=request,
            branch=branch.index,
            token_ids=array("i", request.prompt_token_ids + branch.output_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            arrival=arrival,
            deadline_s=None if request.timeout_s is None else now + request.timeout_s,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def extra_keys(self) -> ExtraKeys:
        salt = self.request.cache_salt
        return () if salt is None else (salt,)

    def block_keys(self, block_size: int, num_blocks: int) -> Iterator[bytes]:
        """Token bytes of the first ``num_blocks`` full blocks."""
        return (self.block_key(index, block_size) for index in range(num_blocks))

    def block_key(self, index: int, block_size: int) -> bytes:
        """Token bytes of full block ``index``."""
        return self.token_ids[index * block_size : (index + 1) * block_size].tobytes()

    def routing_hash(self, index: int, hasher: RoutingHasher) -> int:
        """Hash of full block ``index``: given by the gateway for the prompt, continued here for what follows."""
        given = self.request.routing_hashes
        if index < len(given):
            return given[index]
        size = hasher.block_size
        state = self.hash_state
        if state is None or state.num_tokens != index * size:
            state = hasher.hash_prompt(self.token_ids[: index * size], self.request.cache_salt)[1]
        self.hash_state, routing_hash = hasher.extend(state, self.token_ids[index * size : (index + 1) * size])
        return routing_hash
