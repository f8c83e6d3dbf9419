"""Which worker groups hold which blocks: routing hash → slots of groups.

What a group holds is prefix-closed (it evicts a sequence's tail before its head), and a routing hash names a whole
prefix. So the depth to which a group matches a prompt is found by bisection over the prompt's hashes, for 48 groups at
once, and the answer is a staircase: each group has its own depth.

    prompt's blocks      1   2   3   4   5   6
    group 0              x   x   x   x   x            staircase: [(5, {0}), (2, {1, 3})]
    group 1              x   x
    group 3              x   x

Slot s is bit s % 48 of tag s // 48 in the table, so that a block costs a row for each 48 slots in which somebody holds
it. Masks of slots are Python integers outside.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..worker.routing_hash import HashArray
from .block_table import BlockTable
from .hash_table import BITS_PER_ROW, match_depths
from .predictions import Predictions, place_of

_WORD = (1 << BITS_PER_ROW) - 1
_MAX_SLOTS = 1 << 16
"""Slots are tags of 16 bits where predictions are counted."""

Staircase = list[tuple[int, int]]
"""(depth in blocks, mask of the slots whose match ends there), deepest first; no slot comes twice."""


class PrefixIndex:
    """The confirmed blocks of all groups, in at most ``max_bytes`` (or 16 KB, if that is more)."""

    def __init__(self, max_bytes: int) -> None:
        self._table = BlockTable(max_bytes)
        self._nothing = BlockTable()
        """In the place of predictions."""
        self._live = 0
        self._dying: dict[int, int] = {}
        """Slot that was removed → the pass after which nothing names it."""
        self._table.live = _words(0, 1)

    @property
    def num_entries(self) -> int:
        """Rows in use: a block has one for each 48 slots in which somebody holds it."""
        return self._table.num_entries

    @property
    def num_bytes(self) -> int:
        """Memory of the rows, used or not, both tables of a growth counted."""
        return self._table.num_bytes

    @property
    def stride(self) -> int:
        """Only hashes that are multiples of it are kept."""
        return self._table.stride

    # Slots

    def add_slot(self) -> int:
        """A slot that no entry names. Takes long where 65,536 of them wait for their sweep; RuntimeError where so many
        are live."""
        slot = self._free_slot()
        if slot >= _MAX_SLOTS:
            while not self.sweep(_MAX_SLOTS):
                pass
            slot = self._free_slot()
        if slot >= _MAX_SLOTS:
            raise RuntimeError(f"the prefix index has {_MAX_SLOTS} slots for worker groups, and all are taken")
        self._set_live(self._live | 1 << slot)
        return slot

    def remove_slot(self, slot: int) -> None:
        """Everything the slot holds is invisible from now on. O(1); the sweep frees the entries, then the slot."""
        self._set_live(self._live & ~(1 << slot))
        self._dying[slot] = self._table.num_begun + 1
        self._table.is_dirty = True

    def clear_slot(self, slot: int) -> int:
        """Forget what the slot holds, in O(1), by moving its owner to the empty slot returned."""
        self.remove_slot(slot)
        return self.add_slot()

    # Content

    def stored(self, slot: int, hashes: HashArray) -> None:
        """The slot holds these blocks; again is harmless."""
        self._table.store(hashes, *place_of(slot))

    def removed(self, slot: int, hashes: HashArray) -> None:
        """The slot does not hold these blocks any more; again is harmless."""
        self._table.remove(hashes, *place_of(slot))

    def may_hold(self, slot: int, value: int) -> bool:
        """Whether the slot holds the block, or the stride leaves it unknown."""
        tag, bit = place_of(slot)
        return bool(value & (self.stride - 1)) or bool(self._table.get(value, tag) & bit)

    def depths(
        self, hashes: HashArray, among: int | None = None, predictions: Predictions | None = None
    ) -> npt.NDArray[np.int32]:
        """int32 [num_slots or more]: how many blocks of a prompt each live slot (of ``among``) holds, or is assumed to.

        ``hashes``: of the prompt's prefixes, shortest first. With a stride, depths are rounded down. Where a slot has
        holes, its depth is one of those it holds.
        """
        live = self._table.live if among is None else _words(among & self._live, len(self._table.live))
        depths = np.zeros(len(live) * BITS_PER_ROW, np.int32)
        own, other = self._table, predictions.blocks if predictions else self._nothing
        match_depths(own.rows, own.old, other.rows, other.old, hashes, own.stride - 1, live, depths)
        return depths

    def match(self, hashes: HashArray, among: int | None = None, predictions: Predictions | None = None) -> Staircase:
        """``depths`` as a staircase, for people, tests and benchmarks: decisions take the array as it is."""
        depths = self.depths(hashes, among, predictions)
        slots = np.flatnonzero(depths)
        steps: dict[int, int] = {}
        for slot, depth in zip(slots.tolist(), depths[slots].tolist(), strict=True):
            steps[depth] = steps.get(depth, 0) | 1 << slot
        return sorted(steps.items(), reverse=True)

    # Sweeping

    def sweep(self, num_rows: int) -> bool:
        """Clean ``num_rows`` rows of the table or all that is to do; True when nothing is left to do."""
        return self._table.sweep(num_rows)

    def check(self) -> None:
        """Raise AssertionError if the index contradicts itself."""
        self._table.check()
        known = self._live
        for slot, number in self._dying.items():
            if self._live >> slot & 1:
                raise AssertionError(f"slot {slot} is live and dead at once")
            known |= 1 << slot if number > self._table.num_done else 0
        for value, tag, bits in self._table.entries():
            if bits << tag * BITS_PER_ROW & ~known:
                raise AssertionError(f"entry {value:#x} names slots that are free: {bits:#x} of tag {tag}")
            if self._table.is_tidy and value & (self.stride - 1):
                raise AssertionError(f"entry {value:#x} is not a multiple of the stride {self.stride}")

    def _free_slot(self) -> int:
        """The lowest that is neither live nor waits for the end of a pass."""
        self._dying = {slot: number for slot, number in self._dying.items() if number > self._table.num_done}
        taken = self._live
        for slot in self._dying:
            taken |= 1 << slot
        return (~taken & (taken + 1)).bit_length() - 1

    def _set_live(self, live: int) -> None:
        self._live = live
        num_tags = max(len(self._table.live), live.bit_length() // BITS_PER_ROW + 1)
        self._table.live = _words(live, num_tags)


def _words(mask: int, num_tags: int) -> HashArray:
    """uint64 [num_tags]: the mask's bits, 48 in each."""
    return np.array([mask >> tag * BITS_PER_ROW & _WORD for tag in range(num_tags)], np.uint64)
