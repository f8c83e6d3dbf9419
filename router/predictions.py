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

    def _add(self, assumed: _Assumed) -> None:
        slot, bit, masks, repeats = assumed.slot, 1 << assumed.slot, self._masks, self._repeats
        new = dict.fromkeys(assumed.hashes, bit)
        if len(new) == len(assumed.hashes) and masks.keys().isdisjoint(new):
            masks.update(new)  # The usual case, without a loop in Python.
            return
        for value in assumed.hashes:
            mask = masks.get(value, 0)
            if mask & bit:
                repeats[value, slot] = repeats.get((value, slot), 0) + 1
            else:
                masks[value] = mask | bit

    def _remove(self, assumed: _Assumed) -> None:
        slot, bit, masks = assumed.slot, 1 << assumed.slot, self._masks
        for value in assumed.hashes:
            if self._repeats and self._drop_repeat(value, slot):
                continue
            mask = masks[value]
            if mask == bit:
                del masks[value]
            else:
                masks[value] = mask ^ bit

    def _drop_repeat(self, value: int, slot: int) -> bool:
        count = self._repeats.pop((value, slot), 0)
        if count > 1:
            self._repeats[value, slot] = count - 1
        return count > 0
