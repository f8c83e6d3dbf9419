"""Blocks that a group is assumed to hold soon: those of prompts that were sent there and are not computed yet.

Kept apart from confirmed blocks, so that a prediction that fails leaves no trace. A prediction ends when the request's
prefill is reported (its blocks are then confirmed by events) or the request ends; the time limit is only a backstop.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..worker.routing_hash import HashArray
from .block_table import BlockTable
from .hash_table import BITS_PER_ROW

_TIDIED_ROWS = 4096
"""Rows that are tidied with each ``expire``."""


def place_of(slot: int) -> tuple[int, int]:
    """A slot's tag and its bit in a ``BlockTable``."""
    tag, position = divmod(slot, BITS_PER_ROW)
    return tag, 1 << position


@dataclass(slots=True)
class _Assumed:
    slot: int
    hashes: HashArray
    made_at_s: float


class Predictions:
    """Assumed blocks by slot, each kept as long as one request stands for it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._requests: dict[str, _Assumed] = {}  # oldest first
        self.blocks = BlockTable()
        """As in ``PrefixIndex``."""
        self._counts = BlockTable()
        """(hash, slot) → how many requests assume it."""

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_blocks(self) -> int:
        """Blocks that are assumed somewhere: one for each 48 slots."""
        return self.blocks.num_entries

    @property
    def num_bytes(self) -> int:
        """Memory of both tables."""
        return self.blocks.num_bytes + self._counts.num_bytes

    def may_hold(self, slot: int, value: int) -> bool:
        """Whether the slot is assumed to hold the block."""
        tag, bit = place_of(slot)
        return bool(self.blocks.get(value, tag) & bit)

    def assume(self, request_id: str, slot: int, hashes: HashArray, now: float) -> None:
        """The group in ``slot`` will compute these blocks for the request. Replaces what the request assumed before."""
        self.drop(request_id)
        if len(hashes):
            assumed = self._requests[request_id] = _Assumed(slot, hashes, now)
            self._add(assumed)

    def drop(self, request_id: str) -> None:
        """The request stands for nothing any more. Unknown requests are harmless."""
        assumed = self._requests.pop(request_id, None)
        if assumed is not None:
            self._remove(assumed)

    def drop_slot(self, slot: int) -> None:
        """The group in ``slot`` is gone."""
        for request_id in self._of_slot(slot):
            self.drop(request_id)

    def move_slot(self, old: int, new: int) -> None:
        """The group in slot ``old`` has moved to slot ``new``."""
        for request_id in self._of_slot(old):
            assumed = self._requests[request_id]
            self._remove(assumed)
            assumed.slot = new
            self._add(assumed)

    def expire(self, now: float) -> None:
        """Drop what is older than the time limit."""
        while self._requests:
            request_id, assumed = next(iter(self._requests.items()))
            if now - assumed.made_at_s < self._timeout_s:
                break
            self.drop(request_id)
        self.blocks.sweep(_TIDIED_ROWS)
        self._counts.sweep(_TIDIED_ROWS)

    def check(self) -> None:
        """Raise AssertionError unless the tables are exactly what the requests stand for."""
        self.blocks.check()
        self._counts.check()
        counts = Counter(
            (value, assumed.slot) for assumed in self._requests.values() for value in assumed.hashes.tolist()
        )
        if counts != {(value, slot): count for value, slot, count in self._counts.entries()}:
            raise AssertionError("predictions are miscounted")
        blocks: dict[tuple[int, int], int] = {}
        for value, slot in counts:
            tag, bit = place_of(slot)
            blocks[value, tag] = blocks.get((value, tag), 0) | bit
        if blocks != {(value, tag): bits for value, tag, bits in self.blocks.entries()}:
            raise AssertionError("predicted blocks do not match the requests")

    def _of_slot(self, slot: int) -> list[str]:
        return [request_id for request_id, assumed in self._requests.items() if assumed.slot == slot]

    def _add(self, assumed: _Assumed) -> None:
        self.blocks.store(self._counts.count_up(assumed.hashes, assumed.slot), *place_of(assumed.slot))

    def _remove(self, assumed: _Assumed) -> None:
        self.blocks.remove(self._counts.count_down(assumed.hashes, assumed.slot), *place_of(assumed.slot))
