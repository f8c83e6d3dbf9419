"""Sequence: one branch of a request being generated, and its block table."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from .messages import FinishReason, Pooling, Request
from .prefix_cache import CacheNode, ExtraKeys
from .routing_hash import HASH_BYTES, HashState, RoutingHasher


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """``token_ids`` is prompt and output; the first ``num_computed_tokens`` have K and V in the block table.

    Steps are planned ahead: what a step under way will sample counts in ``num_tokens`` before its id is known.
    """

    request: Request
    branch: int
    token_ids: array[int]
    num_prompt_tokens: int
    plan_limit: int
    """It can be planned ahead while it has fewer tokens: the last one that it may have needs not be computed. 0 for
    beams, which need to know their tokens."""
    arrival: int
    """Counts arrivals at this engine; breaks ties of priority."""
    arrival_s: float
    deadline_s: float | None
    """On the engine's clock, like ``arrival_s``."""
    queue_deadline_s: float | None
    """It must have been admitted before this time."""
    draws: bool = True
    """It gets output. One that does not is over when its prompt is computed."""
    unforked_branches: list[int] = field(default_factory=list)
    """Further branches of the request, made by ``fork`` in the step that samples the first output token."""

    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    """Tokens that steps under way sample for it; at most two."""
    pending_row: int = 0
    """Row of the latest planned step that samples the last of them."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when first admitted; None until then."""
    num_read_tokens: int = 0
    """Of the prompt: so many first tokens are scored or pooled already, by steps planned so far, or need not be. The
    others must be computed, whatever is cached of them."""
    num_expected_cached_tokens: int = 0
    """While it waits: tokens that it is likely to find in the cache when it is admitted."""
    num_preemptions: int = 0
    num_given_up_tokens: int = 0
    """Computed when it was preempted; 0 once it has been admitted again."""
    most_served_tokens: int = 0
    """Of it were computed at some time, and counted for its tenant."""
    slot: int | None = None
    num_sent_blocks: int = 0
    """Entries of the block table that the ranks know."""
    may_share_tail: bool = False
    """The block that its next token is written to may be in another table, or findable: it must be copied first."""

    is_cacheable: bool = False
    """While running: its full blocks go into the prefix cache."""
    cache_tail: CacheNode | None = None
    """Node of the last full block that the prefix cache knows of this sequence."""
    num_stored_blocks: int = 0
    hash_state: HashState | None = None
    """Where the routing hash stands, once it is needed beyond the prompt."""
    frontier: object | None = None
    """Key under which others find that this sequence is about to compute its next block."""
    followers: list[tuple[int, Sequence]] = field(default_factory=list)
    """Waiting sequences that share the so many first blocks with this one, which is computing them."""
    follows: Sequence | None = None

    @classmethod
    def start(
        cls, request: Request, branches: list[int], output: tuple[int, ...], *, arrival: int, now: float
    ) -> Sequence:
        """A waiting sequence with ``output`` generated already (elsewhere). ``branches`` go the same way so far."""
        return cls(
            request=request,
            branch=branches[0],
            token_ids=array("i", request.prompt_token_ids + output),
            num_prompt_tokens=len(request.prompt_token_ids),
            plan_limit=_plan_limit(request),
            arrival=arrival,
            arrival_s=now,
            deadline_s=None if request.timeout_s is None else now + request.timeout_s,
            queue_deadline_s=None if request.queue_timeout_s is None else now + request.queue_timeout_s,
            draws=request.sampling.max_tokens > 0 and request.pooling is None,
            unforked_branches=branches[1:],
            num_expected_cached_tokens=0 if output else request.expected_cached_tokens,
            num_read_tokens=_num_not_to_read(request),
        )

    def fork(self, branch: int) -> Sequence:
        """Another branch with the same tokens, waiting: it holds nothing yet."""
        return Sequence(
            request=self.request,
            branch=branch,
            token_ids=self.token_ids[:],
            num_prompt_tokens=self.num_prompt_tokens,
            plan_limit=self.plan_limit,
            arrival=self.arrival,
            arrival_s=self.arrival_s,
            deadline_s=self.deadline_s,
            queue_deadline_s=self.queue_deadline_s,
            num_cached_tokens=self.num_cached_tokens,
            num_read_tokens=self.num_prompt_tokens,
            hash_state=self.hash_state,
        )

    def append(self, token_id: int) -> None:
        """The token that the oldest step under way has sampled."""
        self.token_ids.append(token_id)
        if self.num_pending_tokens:
            self.num_pending_tokens -= 1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """0 while it waits for a token that decides how it goes on."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def num_tokens_to_come(self) -> int:
        """Output that it may still get."""
        return max(0, self.request.sampling.max_tokens - self.num_output_tokens) if self.draws else 0

    @property
    def urgency(self) -> int:
        """Its priority, or that of a more urgent one that waits for what it computes."""
        return min([self.request.priority, *(follower.request.priority for _, follower in self.followers)])

    @property
    def was_admitted(self) -> bool:
        return self.num_cached_tokens is not None

    @property
    def is_beam(self) -> bool:
        return self.request.sampling.beam_width is not None

    @property
    def has_siblings(self) -> bool:
        return len(self.request.branches) > 1 or self.is_beam

    @property
    def num_tokens_to_read(self) -> int:
        """How many of the prompt's tokens are read once ``num_read_tokens`` has come there: nothing that is known
        follows the last one, so that it is not scored."""
        return self.num_prompt_tokens - (self.request.pooling is None)

    @property
    def extra_keys(self) -> ExtraKeys:
        salt = self.request.cache_salt
        return () if salt is None else (salt,)

    def num_full_blocks(self, block_size: int) -> int:
        """Blocks whose tokens are all known."""
        return len(self.token_ids) // block_size

    def num_findable_blocks(self, block_size: int) -> int:
        """Full blocks that it need not compute where others have. The last token is computed in any case."""
        if self.num_read_tokens < self.num_prompt_tokens - 1:
            return self.num_read_tokens // block_size
        return self.num_full_blocks(block_size)

    def block_keys(self, block_size: int, num_blocks: int) -> Iterator[bytes]:
        """Token bytes of the first ``num_blocks`` full blocks."""
        return (self.block_key(index, block_size) for index in range(num_blocks))

    def block_key(self, index: int, block_size: int) -> bytes:
        """Token bytes of full block ``index``."""
        return self.token_ids[index * block_size : (index + 1) * block_size].tobytes()

    def num_common_blocks(self, other: Sequence, block_size: int, num_blocks: int) -> int:
        """How many of the first ``num_blocks`` full blocks, which both have, are the same in both."""
        num_tokens = num_blocks * block_size
        if self.token_ids[:num_tokens] == other.token_ids[:num_tokens]:
            return num_blocks
        differ = (i for i in range(num_tokens) if self.token_ids[i] != other.token_ids[i])
        return next(differ) // block_size

    def routing_hash(self, index: int, hasher: RoutingHasher) -> int:
        """Hash of full block ``index``: given by the gateway for the prompt, continued here for what follows."""
        given = self.request.routing_hashes
        start = index * HASH_BYTES
        if start < len(given):
            return int.from_bytes(given[start : start + HASH_BYTES], "little")
        size = hasher.block_size
        state = self.hash_state
        if state is None or state.num_tokens != index * size:
            state = hasher.hash_prompt(self.token_ids[: index * size], self.request.cache_salt)[1]
        self.hash_state, routing_hash = hasher.extend(state, self.token_ids[index * size : (index + 1) * size])
        return routing_hash


def reads_whole_prompt(request: Request) -> bool:
    """Every token of its prompt is computed, whatever is cached: all are scored, or pooled. A request that has output
    was told all of that before."""
    is_scored = request.sampling.num_prompt_logprobs is not None
    return request.pooling is Pooling.MEAN or (is_scored and not any(b.output_token_ids for b in request.branches))


def _num_not_to_read(request: Request) -> int:
    """First tokens of the prompt whose hidden states matter to nobody."""
    return 0 if reads_whole_prompt(request) else len(request.prompt_token_ids) - (request.pooling is Pooling.LAST)


def _plan_limit(request: Request) -> int:
    sampling = request.sampling
    return 0 if sampling.beam_width is not None else len(request.prompt_token_ids) + sampling.max_tokens
