"""A hash table that grows, shrinks and is swept in small steps, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..worker.routing_hash import HashArray
from .hash_table import (
    BITS_PER_ROW,
    TAIL,
    Rows,
    clear_bits,
    count_down,
    count_up,
    get_bits,
    move_rows,
    set_bits,
    sweep_rows,
)

ROW_BYTES = 16
_NO_ROWS: Rows = np.empty((0, 2), np.uint64)
_ALL_LIVE: HashArray = np.empty(0, np.uint64)

_MIN_CAPACITY = 512
_BATCH = 1024
"""Hashes between which the size is looked at."""
_MOVED_PER_NEW = 8
_SWEPT_PER_NEW = 32
"""Rows that a pass goes over for each hash that is stored meanwhile. A table may be crowded for 1/8 of its capacity
before it is full: enough for three passes in place, or for half of a move, after which more room is there."""
_GROWTH = 1.5
_MIN_GROWTH = 1.25
_SHRINK_LOAD = 1 / 16
_MAX_STRIDE = 1 << 32
"""Beyond it hashes are no hashes: what finds no room is left out."""


class BlockTable:
    """(routing hash, tag) → 48 bits, of which one at least is set.

    Over a load of 5/8 it grows, unless that would take more than ``max_bytes``, both tables counted. Then a pass
    removes the bits that are not ``live``; then ``stride`` doubles, and only hashes that are multiples of it are kept,
    which is every second, fourth … on average, chosen alike by whoever stores, removes or looks up. It does not come
    down again.

    ``sweep`` goes over as many rows as it is told; ``store`` over at most 32 for each of its hashes, or once over a
    table of less than 8,192 rows. So no call takes long.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.rows: Rows = _empty(_MIN_CAPACITY)
        self.old: Rows = _NO_ROWS
        self.num_entries = 0
        self.stride = 1
        self.live: HashArray = _ALL_LIVE
        """uint64 [num_tags]: bits that are kept; [0]: all."""
        self.is_dirty = False
        """Something is not live that was so when the last pass began."""
        self.num_begun = 0
        self.num_done = 0
        """Passes over all rows, in place or into a table of another size."""
        self._max_rows = None if max_bytes is None else max_bytes // ROW_BYTES
        self._left = 0
        """Rows of ``old`` if there are any, else of ``rows``, that the present pass has not been over yet."""

    @property
    def num_bytes(self) -> int:
        """Memory of the rows, used or not."""
        return self.rows.nbytes + self.old.nbytes

    @property
    def is_tidy(self) -> bool:
        """No pass is under way or wanted."""
        return self._left == 0 and not self.is_dirty

    def get(self, value: int, tag: int) -> int:
        """The bits; 0 for what is not there."""
        return int(get_bits(self.rows, self.old, np.uint64(value), tag))

    def store(self, hashes: HashArray, tag: int, bits: int) -> None:
        """Set ``bits`` of each of the hashes."""
        for first in range(0, len(hashes), _BATCH):
            batch = hashes[first : first + _BATCH]
            while True:
                num_done, num_new = set_bits(
                    self.rows, self.old, self._to_move, batch, tag, bits, self.stride - 1, self._room
                )
                self.num_entries += num_new
                self._make_room(len(batch))
                if num_done == len(batch) or self.stride > _MAX_STRIDE:
                    break
                batch = batch[num_done:]

    def remove(self, hashes: HashArray, tag: int, bits: int) -> None:
        """Clear ``bits`` of each of the hashes."""
        self.num_entries -= clear_bits(self.rows, self.old, hashes, tag, bits)

    def count_up(self, hashes: HashArray, tag: int) -> HashArray:
        """The bits as a number: one more for each of the hashes. Returns those that had none. Without a stride only."""
        parts = []
        for first in range(0, len(hashes), _BATCH):
            batch = hashes[first : first + _BATCH]
            while len(batch):
                fresh = np.empty(len(batch), np.uint64)
                num_done, num_new = count_up(self.rows, self.old, self._to_move, batch, tag, fresh, self._room)
                self.num_entries += num_new
                self._make_room(len(batch))
                parts.append(fresh[:num_new])
                batch = batch[num_done:]
        return np.concatenate(parts) if parts else hashes

    def count_down(self, hashes: HashArray, tag: int) -> HashArray:
        """One less for each of the hashes. Returns those that have none left."""
        gone = np.empty(len(hashes), np.uint64)
        num_gone = count_down(self.rows, self.old, hashes, tag, gone)
        self.num_entries -= num_gone
        return gone[:num_gone]

    def sweep(self, num_rows: int) -> bool:
        """Go over ``num_rows`` rows of what is to do; True when nothing is left to do."""
        if self._left == 0:
            self._begin_if_useful()
        self._advance(num_rows)
        return self.is_tidy

    def entries(self) -> Iterator[tuple[int, int, int]]:
        """(hash, tag, bits) of all."""
        for rows in (self.rows, self.old):
            for value, word in rows[rows[:, 1] != 0].tolist():
                yield value, word >> BITS_PER_ROW, word & (1 << BITS_PER_ROW) - 1

    def check(self) -> None:
        """Raise AssertionError if the table contradicts itself."""
        found = {(value, tag): bits for value, tag, bits in self.entries()}
        num_rows = sum([int(np.count_nonzero(rows[:, 1])) for rows in (self.rows, self.old)])
        if not len(found) == num_rows == self.num_entries:
            raise AssertionError(f"{self.num_entries} entries are {num_rows} rows with {len(found)} keys")
        for (value, tag), bits in found.items():
            if not bits or self.get(value, tag) != bits:
                raise AssertionError(f"entry {value:#x}, {tag} has the bits {bits:#x}, but they are not found")
        if len(self.old) and self.old[self._left :, 1].any():
            raise AssertionError("a row that was moved is still there")

    # Passes

    @property
    def _capacity(self) -> int:
        return len(self.rows) - TAIL

    @property
    def _to_move(self) -> int:
        """Rows of ``old`` that are still to be moved."""
        return self._left if len(self.old) else 0

    @property
    def _room(self) -> int:
        """New rows until the table is full."""
        return max(0, self._capacity * 3 // 4 - self.num_entries)

    def _make_room(self, num_stored: int) -> None:
        """After so many hashes were stored: begin a pass when there is need for one, and go on with it."""
        if self._room == 0:
            self._advance(len(self.rows) + len(self.old))
        if self._left == 0 and self.num_entries > self._capacity * 5 // 8:
            self._begin_crowded()
        if self._left:
            self._advance(num_stored * (_MOVED_PER_NEW if len(self.old) else _SWEPT_PER_NEW))

    def _begin_crowded(self) -> None:
        capacity = self._larger_capacity()
        if capacity is None and not self.is_dirty and self.stride <= _MAX_STRIDE:
            self.stride *= 2
        self._begin(capacity)

    def _begin_if_useful(self) -> None:
        smaller = max(_MIN_CAPACITY, 4 * self.num_entries)
        if self.num_entries < self._capacity * _SHRINK_LOAD and smaller < self._capacity and self._may_have(smaller):
            self._begin(smaller)
        elif self.is_dirty:
            self._begin(None)

    def _larger_capacity(self) -> int | None:
        capacity = int(_GROWTH * self._capacity)
        if not self._may_have(capacity):
            capacity = (self._max_rows or 0) - len(self.rows) - TAIL
        return capacity if capacity >= self._capacity * _MIN_GROWTH else None

    def _may_have(self, capacity: int) -> bool:
        """Beside the present one."""
        return self._max_rows is None or len(self.rows) + capacity + TAIL <= self._max_rows

    def _begin(self, capacity: int | None) -> None:
        """A pass over all rows: into a new table of ``capacity``, or in place."""
        if capacity is not None:
            self.old, self.rows = self.rows, _empty(capacity)
        self._left = len(self.old) or len(self.rows)
        self.is_dirty = False
        self.num_begun += 1

    def _advance(self, num_rows: int) -> None:
        if self._left == 0:
            return
        start, self._left = self._left, max(0, self._left - num_rows)
        if len(self.old):
            num_gone = move_rows(self.rows, self.old, start, self._left, self.live, self.stride - 1)
        else:
            num_gone = sweep_rows(self.rows, start, self._left, self.live, self.stride - 1)
        self.num_entries -= num_gone
        if self._left == 0:
            self.old, self.num_done = _NO_ROWS, self.num_begun


def _empty(capacity: int) -> npt.NDArray[np.uint64]:
    """Pages that are not touched yet cost no time."""
    return np.zeros((capacity + TAIL, 2), np.uint64)
