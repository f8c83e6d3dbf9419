"""Blocks that a group is assumed to hold soon: those of prompts that were sent there and are not computed yet.

Kept apart from confirmed blocks, so that a prediction that fails leaves no trace. A prediction ends when the request's
prefill is reported (its blocks are then confirmed by events) or the request ends; the time limit is only a backstop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Assumed:
    slot: int
    hashes: Sequence[int]
    made_at_s: float


class Predictions:
    """Assumed blocks as bitmasks of slots, each kept as long as one request stands for it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._requests: dict[str, _Assumed] = {}  # oldest first
        self._masks: dict[int, int] = {}
        self._repeats: dict[tuple[int, int], int] = {}
        """(hash, slot) → how many requests beyond the first assume it."""

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_blocks(self) -> int:
        """Different blocks that are assumed somewhere."""
        return len(self._masks)

    def mask_of(self, value: int) -> int:
        """The slots that are assumed to hold the block."""
        return self._masks.get(value, 0)

    def assume(self, request_id: str, slot: int, hashes: Sequence[int], now: float) -> None:
        """The group in ``slot`` will compute these blocks for the request. Replaces what the request assumed before."""
        self.drop(request_id)
        if not hashes:
            return
        self._requests[request_id] = _Assumed(slot, hashes, now)
        bit, masks = 1 << slot, self._masks
        for value in hashes:
            mask = masks.get(value, 0)
            if mask & bit:
                self._repeats[value, slot] = self._repeats.get((value, slot), 0) + 1
            else:
                masks[value] = mask | bit

    def drop(self, request_id: str) -> None:
        """The request stands for nothing any more. Unknown requests are harmless."""
        assumed = self._requests.pop(request_id, None)
        if assumed is None:
            return
        for value in assumed.hashes:
            if not self._drop_repeat(value, assumed.slot):
                self._clear_bit(value, 1 << assumed.slot)

    def drop_slot(self, slot: int) -> None:
        """The group in ``slot`` is gone."""
        for request_id in self._of_slot(slot):
            self.drop(request_id)

    def move_slot(self, old: int, new: int) -> None:
        """The group in slot ``old`` has moved to slot ``new``."""
        for request_id in self._of_slot(old):
            assumed = self._requests[request_id]
            self.assume(request_id, new, assumed.hashes, assumed.made_at_s)

    def expire(self, now: float) -> None:
        """Drop what is older than the time limit."""
        while self._requests:
            request_id, assumed = next(iter(self._requests.items()))
            if now - assumed.made_at_s < self._timeout_s:
                return
            self.drop(request_id)

    def check(self) -> None:
        """Raise AssertionError unless the masks are exactly what the requests stand for."""
        counts: dict[tuple[int, int], int] = {}
        for assumed in self._requests.values():
            for value in assumed.hashes:
                counts[value, assumed.slot] = counts.get((value, assumed.slot), 0) + 1
        if {pair: count - 1 for pair, count in counts.items() if count > 1} != self._repeats:
            raise AssertionError("repeated predictions are miscounted")
        masks: dict[int, int] = {}
        for value, slot in counts:
            masks[value] = masks.get(value, 0) | 1 << slot
        if masks != self._masks:
            raise AssertionError("predicted blocks do not match the requests")

    def _of_slot(self, slot: int) -> list[str]:
        return [request_id for request_id, assumed in self._requests.items() if assumed.slot == slot]

    def _drop_repeat(self, value: int, slot: int) -> bool:
        if not self._repeats:
            return False
        count = self._repeats.pop((value, slot), 0)
        if count > 1:
            self._repeats[value, slot] = count - 1
        return count > 0

    def _clear_bit(self, value: int, bit: int) -> None:
        mask = self._masks[value] & ~bit
        if mask:
            self._masks[value] = mask
        else:
            del self._masks[value]
