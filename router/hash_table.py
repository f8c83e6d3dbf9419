"""A hash table in one array: (64-bit hash, 16-bit tag) → 48 bits, of which one at least is set.

    rows, uint64 [capacity + TAIL, 2]     | hash | tag (16), bits (48) | hash | …      0 in the second: empty

Open addressing with linear probing, and without tombstones: what follows a deleted row moves up (Knuth, The Art of
Computer Programming, volume 3, section 6.4, algorithm R). Probing never wraps around; it runs on into the tail. So rows
lie in the order of their homes, but for a few places, and going through them from the end to the start is safe while
rows are added and deleted: nothing ever moves from the part to be done into the part that was done.

While a table is replaced by one of another size, its rows move over from the end, a bounded number at a time; a row is
in ``old`` or in ``rows``, never in both. ``old`` has no rows at other times.

A row costs a kernel about 3 ns where rows are read in order, and a miss of the cache, some 100 ns, where they are not.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import TypeAlias

import numba
import numpy as np
import numpy.typing as npt
from numba import types

Rows: TypeAlias = npt.NDArray[np.uint64]
"""uint64 [capacity + TAIL, 2], or [0, 2]."""

TAIL = 512
"""Rows behind the last home. At a load of 3/4 one of 2e8 tables needs more (then a block is forgotten)."""
BITS_PER_ROW = 48

_BITS = np.uint64((1 << BITS_PER_ROW) - 1)
_TAG_SHIFT = np.uint64(BITS_PER_ROW)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_HALF = np.uint64(32)
_ODD = np.uint64(0x9E3779B97F4A7C15)
"""2^64 / golden ratio: Fibonacci hashing (Knuth, section 6.4), so that numbers that are no hashes spread as well."""
_TAG_ODD = np.uint64(0xC2B2AE3D27D4EB4F)

_ROWS = types.Array(types.uint64, 2, "C")
_HASHES = types.Array(types.uint64, 1, "C", readonly=True)
_WORDS = types.Array(types.uint64, 1, "C")
_U = types.uint64
_I = types.int64


@numba.njit
def _home(key, tag, num_rows):
    mixed = (key + tag * _TAG_ODD) * _ODD
    return np.int64(((mixed >> _HALF) * np.uint64(num_rows - TAIL)) >> _HALF)


@numba.njit
def _find(rows, key, tag):
    """Where it is; or ~(the empty row where it would be), which may be the end."""
    num_rows = rows.shape[0]
    i = _home(key, tag, num_rows)
    while i < num_rows and rows[i, 1] != _ZERO:
        if rows[i, 0] == key and rows[i, 1] >> _TAG_SHIFT == tag:
            return i
        i += 1
    return ~i


@numba.njit
def _get(rows, old, key, tag):
    i = _find(rows, key, tag)
    if i >= 0:
        return rows[i, 1] & _BITS
    if old.shape[0] > 0:
        i = _find(old, key, tag)
        if i >= 0:
            return old[i, 1] & _BITS
    return _ZERO


@numba.njit
def _delete(rows, i):
    num_rows = rows.shape[0]
    j = i + 1
    while j < num_rows and rows[j, 1] != _ZERO:
        if _home(rows[j, 0], rows[j, 1] >> _TAG_SHIFT, num_rows) <= i:
            rows[i, 0] = rows[j, 0]
            rows[i, 1] = rows[j, 1]
            i = j
        j += 1
    rows[i, 0] = _ZERO
    rows[i, 1] = _ZERO


@numba.njit
def _insert(rows, place, key, value):
    """At ~``place``, as ``_find`` gave it; False: behind the tail, where nothing can be."""
    i = ~place
    if i >= rows.shape[0]:
        return False
    rows[i, 0] = key
    rows[i, 1] = value
    return True


@numba.njit
def _insert_either(rows, place, old, old_place, left, key, value):
    """Into ``old`` where that has not been moved yet, at row ``left`` and behind. So the pages of a large new table are
    touched, and made by the system, one after the other, not all at once by hashes that come from anywhere."""
    if ~old_place < left:
        return _insert(old, old_place, key, value)
    return _insert(rows, place, key, value)


@numba.njit
def _clean(value, live):
    """A row's second word without the bits that are not in ``live``; 0 when none is left."""
    if live.shape[0] == 0:
        return value
    tag = value >> _TAG_SHIFT
    bits = value & _BITS & live[np.int64(tag)]
    return _ZERO if bits == _ZERO else tag << _TAG_SHIFT | bits


@numba.njit(_U(_ROWS, _ROWS, _U, _U), cache=True)
def get_bits(rows, old, key, tag):
    """0 for what is not there."""
    return _get(rows, old, key, tag)


@numba.njit(types.UniTuple(_I, 2)(_ROWS, _ROWS, _I, _HASHES, _U, _U, _U, _I), cache=True)
def set_bits(rows, old, left, hashes, tag, bits, skip, room):
    """Set ``bits`` of each of the hashes but those that have a bit of ``skip``; stops where a new row is needed and
    ``room`` new ones were made. ``left``: rows of ``old`` that are still to be moved.

    Returns how many of the hashes are done, and how many rows are new.
    """
    num_new = 0
    for n in range(hashes.shape[0]):
        key = hashes[n]
        if key & skip != _ZERO:
            continue
        place = ~left
        if old.shape[0] > 0:
            place = _find(old, key, tag)
            if place >= 0:
                old[place, 1] |= bits
                continue
        i = _find(rows, key, tag)
        if i >= 0:
            rows[i, 1] |= bits
        elif num_new == room:
            return n, num_new
        elif _insert_either(rows, i, old, place, left, key, tag << _TAG_SHIFT | bits):
            num_new += 1
    return hashes.shape[0], num_new


@numba.njit(_I(_ROWS, _ROWS, _HASHES, _U, _U), cache=True)
def clear_bits(rows, old, hashes, tag, bits):
    """Clear ``bits`` of each of the hashes, wherever it is. Returns how many rows are gone."""
    num_gone = 0
    for n in range(hashes.shape[0]):
        table = rows
        i = _find(rows, hashes[n], tag)
        if i < 0 and old.shape[0] > 0:
            table = old
            i = _find(old, hashes[n], tag)
        if i >= 0:
            table[i, 1] &= ~bits
            if table[i, 1] & _BITS == _ZERO:
                _delete(table, i)
                num_gone += 1
    return num_gone


@numba.njit(types.UniTuple(_I, 2)(_ROWS, _ROWS, _I, _HASHES, _U, _WORDS, _I), cache=True)
def count_up(rows, old, left, hashes, tag, fresh, room):
    """The bits as numbers: one more for each of the hashes. ``fresh``, as long as they, gets those that had none.

    Returns how many of the hashes are done (see ``set_bits``), and how many are in ``fresh``: rows that are new.
    """
    num_fresh = 0
    for n in range(hashes.shape[0]):
        key = hashes[n]
        place = ~left
        if old.shape[0] > 0:
            place = _find(old, key, tag)
            if place >= 0:
                old[place, 1] += _ONE
                continue
        i = _find(rows, key, tag)
        if i >= 0:
            rows[i, 1] += _ONE
        elif num_fresh == room:
            return n, num_fresh
        elif _insert_either(rows, i, old, place, left, key, tag << _TAG_SHIFT | _ONE):
            fresh[num_fresh] = key
            num_fresh += 1
    return hashes.shape[0], num_fresh


@numba.njit(_I(_ROWS, _ROWS, _HASHES, _U, _WORDS), cache=True)
def count_down(rows, old, hashes, tag, gone):
    """One less for each of the hashes; ``gone``, as long as they, gets those that have none left. Returns how many."""
    num_gone = 0
    for n in range(hashes.shape[0]):
        table = rows
        i = _find(rows, hashes[n], tag)
        if i < 0 and old.shape[0] > 0:
            table = old
            i = _find(old, hashes[n], tag)
        if i >= 0:
            table[i, 1] -= _ONE
            if table[i, 1] & _BITS == _ZERO:
                _delete(table, i)
                gone[num_gone] = hashes[n]
                num_gone += 1
    return num_gone


@numba.njit(_I(_ROWS, _I, _I, _WORDS, _U), cache=True)
def sweep_rows(rows, start, stop, live, skip):
    """From row ``start`` - 1 down to row ``stop``: bits that are not in ``live``, uint64 [num_tags] (or [0]: all are),
    and rows whose hash has a bit of ``skip`` go. Returns how many rows are gone."""
    num_gone = 0
    for i in range(start - 1, stop - 1, -1):
        if rows[i, 1] != _ZERO:
            value = _clean(rows[i, 1], live)
            if value == _ZERO or rows[i, 0] & skip != _ZERO:
                _delete(rows, i)
                num_gone += 1
            else:
                rows[i, 1] = value
    return num_gone


@numba.njit(_I(_ROWS, _ROWS, _I, _I, _WORDS, _U), cache=True)
def move_rows(rows, old, start, stop, live, skip):
    """From row ``start`` - 1 of ``old`` down to row ``stop``: into ``rows``, swept as by ``sweep_rows``."""
    num_gone = 0
    for i in range(start - 1, stop - 1, -1):
        if old[i, 1] != _ZERO:
            key, value = old[i, 0], _clean(old[i, 1], live)
            old[i, 1] = _ZERO
            if (
                value == _ZERO
                or key & skip != _ZERO
                or not _insert(rows, _find(rows, key, value >> _TAG_SHIFT), key, value)
            ):
                num_gone += 1
    return num_gone


@numba.njit(
    types.void(_ROWS, _ROWS, _ROWS, _ROWS, _HASHES, _U, _WORDS, types.Array(types.int32, 1, "C")),
    cache=True,
)
def match_depths(rows, old, more, more_old, hashes, skip, among, depths):
    """How far each slot holds a prompt, in one table or the other.

    ``hashes`` are those of the prompt's prefixes, shortest first; those that have a bit of ``skip`` are left out.
    ``among``, uint64 [num_tags]: the slots that are asked for; slot s is bit s % 48 of tag s // 48. ``depths``, int32
    [num_tags * 48]: 0 on entry; gets the number of hashes up to the last that the slot has. Found by bisection, for all
    slots of a tag at once: a slot that has one hash has all before it. Where it does not, its depth is one that it has,
    and one without the first hash has none.
    """
    kept = np.empty(hashes.shape[0], np.int32)
    num_kept = 0
    for n in range(hashes.shape[0]):
        if hashes[n] & skip == _ZERO:
            kept[num_kept] = n
            num_kept += 1
    if num_kept == 0:
        return
    for t in range(among.shape[0]):
        if among[t] == _ZERO:
            continue
        tag = np.uint64(t)
        key = hashes[kept[0]]
        left = (_get(rows, old, key, tag) | _get(more, more_old, key, tag)) & among[t]
        top = num_kept
        while left != _ZERO:
            low, high, found = 0, top, left
            while high - low > 1:  # held by some of ``left`` at low, by none from high on
                middle = (low + high) // 2
                key = hashes[kept[middle]]
                bits = (_get(rows, old, key, tag) | _get(more, more_old, key, tag)) & left
                if bits != _ZERO:
                    low, found = middle, bits
                else:
                    high = middle
            left &= ~found
            top = low
            slot = t * BITS_PER_ROW
            while found != _ZERO:
                if found & _ONE != _ZERO:
                    depths[slot] = kept[low] + 1
                found >>= _ONE
                slot += 1
