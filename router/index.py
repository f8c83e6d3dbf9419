"""Which worker groups hold which blocks: routing hash → bitmask of group slots.

What a group holds is prefix-closed (it evicts a sequence's tail before its head), and a routing hash names a whole
prefix. So the depth to which a group matches a prompt is found by bisection over the prompt's hashes, for all groups at
once, and the answer is a staircase: each group has its own depth.

    prompt's blocks      1   2   3   4   5   6
    group 0              x   x   x   x   x            staircase: [(5, {0}), (2, {1, 3})]
    group 1              x   x
    group 3              x   x

Entries live in shards by the high bits of the hash, so that sweeping and a dictionary's growth come in small pieces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

_NUM_SHARDS = 256
_SHARD_SHIFT = 56
_BATCH = 256
"""Blocks stored before the size is looked at: the bound on the size may be passed by this many."""
_SWEEP_PER_STORED = 48
"""Entries swept for each stored block once the index is nearly full; with this many, two passes end in time."""
_MAX_INTERNED = 1 << 16
_KEY_BYTES = 48
"""A 64-bit integer object, rounded up to its allocation."""
BYTES_PER_ENTRY = 112
"""A key and its share of a dictionary that is about to grow, for the bound; ``num_bytes`` looks at the dictionaries."""

Staircase = list[tuple[int, int]]
"""(depth in blocks, mask of the slots whose match ends there), deepest first; no slot comes twice."""


def find_staircase(mask_of: Callable[[int], int], hashes: Sequence[int], among: int) -> Staircase:
    """Match ``hashes`` (of the prompt's prefixes, shortest first) for the slots in ``among``.

    ``mask_of`` gives the slots that hold a block. Where a slot has holes, its depth is one of those it holds.
    """
    steps: Staircase = []
    top = len(hashes)
    left = mask_of(hashes[0]) & among if top else 0
    while left:
        low, high, found = 0, top, left
        while high - low > 1:  # held by some of ``left`` at low, by none from high on
            middle = (low + high) // 2
            mask = mask_of(hashes[middle]) & left
            if mask:
                low, found = middle, mask
            else:
                high = middle
        steps.append((low + 1, found))
        left &= ~found
        top = low
    return steps


def slots_in(mask: int) -> list[int]:
    """The slots of a mask, lowest first."""
    slots = []
    while mask:
        lowest = mask & -mask
        slots.append(lowest.bit_length() - 1)
        mask ^= lowest
    return slots


class PrefixIndex:
    """The confirmed blocks of all groups, in at most about ``max_bytes``.

    Over 7/8 of the bound the stride doubles: only hashes that are multiples of it are kept, which is every second,
    fourth … block on average, chosen alike by whoever stores, removes or looks up. It does not come down again.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_entries = max(1, max_bytes // BYTES_PER_ENTRY)
        self.stride = 1
        self.num_entries = 0
        self._shards: list[dict[int, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._interned: dict[int, int] = {}
        self._live = 0
        self._dead = 0
        """Removed since the present pass of the sweep began; swept by the next one."""
        self._sweeping = 0
        self._unswept: list[int] = []

    # Slots

    def add_slot(self) -> int:
        """A slot that no entry names."""
        taken = self._live | self._dead | self._sweeping
        slot = (~taken & (taken + 1)).bit_length() - 1
        self._live |= 1 << slot
        return slot

    def remove_slot(self, slot: int) -> None:
        """Everything the slot holds is invisible from now on. O(1); the sweep frees the entries, then the slot."""
        bit = 1 << slot
        self._live &= ~bit
        self._dead |= bit

    def clear_slot(self, slot: int) -> int:
        """Forget what the slot holds, in O(1), by moving its owner to the empty slot returned."""
        self.remove_slot(slot)
        return self.add_slot()

    # Content

    def stored(self, slot: int, hashes: Sequence[int]) -> None:
        """The slot holds these blocks; again is harmless."""
        for first in range(0, len(hashes), _BATCH):
            self._store(1 << slot, hashes[first : first + _BATCH])
            if self.num_entries > self.max_entries * 7 // 8:
                self._make_room()

    def removed(self, slot: int, hashes: Sequence[int]) -> None:
        """The slot does not hold these blocks any more; again is harmless."""
        bit, shards, live, intern = 1 << slot, self._shards, self._live, self._interned.setdefault
        for value in hashes:
            shard = shards[value >> _SHARD_SHIFT]
            mask = shard.get(value, 0)
            if mask & bit:
                mask ^= bit
                if mask & live:
                    shard[value] = intern(mask, mask)
                else:
                    del shard[value]
                    self.num_entries -= 1

    def mask_of(self, value: int) -> int:
        """The slots that hold the block, those removed but not swept included: combine it with live slots only."""
        return self._shards[value >> _SHARD_SHIFT].get(value, 0)

    def may_hold(self, slot: int, value: int) -> bool:
        """Whether the slot holds the block, or the stride leaves it unknown."""
        return bool(value & (self.stride - 1)) or bool(self.mask_of(value) >> slot & 1)

    def sample(self, hashes: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Those of a prompt's ``hashes`` that the stride keeps, and the depth in blocks of each."""
        skip = self.stride - 1
        if not skip:
            return hashes, range(1, len(hashes) + 1)
        depths = [depth for depth, value in enumerate(hashes, start=1) if not value & skip]
        return [hashes[depth - 1] for depth in depths], depths

    def match(self, hashes: Sequence[int], among: int | None = None) -> Staircase:
        """How deep the live slots (of ``among``) hold a prompt. With a stride, depths are rounded down."""
        kept, depths = self.sample(hashes)
        live = self._live if among is None else self._live & among
        return [(depths[step - 1], mask) for step, mask in find_staircase(self.mask_of, kept, live)]

    # Sweeping and size

    def sweep(self, budget: int) -> bool:
        """Clean at least ``budget`` entries or all that is to do; True when nothing is left to do."""
        if not self._unswept:
            self._begin_pass()
        while budget > 0 and self._unswept:
            budget -= 1 + self._sweep_shard(self._unswept.pop())
            if not self._unswept:
                self._sweeping = 0
                self._begin_pass()
        return not self._unswept

    @property
    def num_bytes(self) -> int:
        """Memory of the entries: dictionaries, keys and the masks that they share."""
        return (
            sum(map(sys.getsizeof, self._shards))
            + self.num_entries * _KEY_BYTES
            + sys.getsizeof(self._interned)
            + len(self._interned) * (32 + self._live.bit_length() // 8)
        )

    def check(self) -> None:
        """Raise AssertionError if the index contradicts itself."""
        known = self._live | self._dead | self._sweeping
        unswept = set(self._unswept)
        if self._live & (self._dead | self._sweeping):
            raise AssertionError("a slot is live and dead at once")
        if sum(map(len, self._shards)) != self.num_entries:
            raise AssertionError("num_entries is not the number of entries")
        for number, shard in enumerate(self._shards):
            swept = 0 if number in unswept else self._sweeping
            for value, mask in shard.items():
                if value >> _SHARD_SHIFT != number or not mask or mask & ~known or mask & swept:
                    raise AssertionError(f"entry {value:#x} in shard {number} has mask {mask:#x}")
                if number not in unswept and value & (self.stride - 1):
                    raise AssertionError(f"entry {value:#x} is not a multiple of the stride {self.stride}")

    def _store(self, bit: int, hashes: Sequence[int]) -> None:
        shards, skip, intern, num_new = self._shards, self.stride - 1, self._interned.setdefault, 0
        for value in hashes:
            if value & skip:
                continue
            shard = shards[value >> _SHARD_SHIFT]
            mask = shard.get(value)
            if mask is None:
                shard[value] = intern(bit, bit)
                num_new += 1
            elif not mask & bit:
                mask |= bit
                shard[value] = intern(mask, mask)
        self.num_entries += num_new
        if len(self._interned) > _MAX_INTERNED:
            self._interned.clear()  # Only sharing is lost, and the masks now in use are interned again as they change.

    def _make_room(self) -> None:
        """Take a few steps of a pass; a new pass gets a coarser stride unless dead slots are there to be swept."""
        if not self._unswept and not self._dead:
            self.stride *= 2
            self._unswept = list(range(_NUM_SHARDS))
        self.sweep(_SWEEP_PER_STORED * _BATCH)

    def _begin_pass(self) -> None:
        if self._dead:
            self._sweeping, self._dead = self._dead, 0
            self._unswept = list(range(_NUM_SHARDS))

    def _sweep_shard(self, number: int) -> int:
        """Free what dead slots and the stride leave behind in one shard; the number of entries looked at."""
        shard, dead, skip = self._shards[number], self._sweeping, self.stride - 1
        size = len(shard)
        for value in [value for value, mask in shard.items() if mask & dead or value & skip]:
            mask = shard[value] & ~dead
            if mask and not value & skip:
                shard[value] = self._interned.setdefault(mask, mask)
            else:
                del shard[value]
        self.num_entries -= size - len(shard)
        if 2 * len(shard) < size:
            self._shards[number] = dict(shard)  # A dictionary does not shrink by itself.
        return size
