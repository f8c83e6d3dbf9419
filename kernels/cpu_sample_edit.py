"""What a request wishes for its logits, on CPUs: penalties, bias, bans and the allow-mask, in a copy of a row.

A kernel is given one address, that of a table of addresses, so that what most steps have none of costs them nothing.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from array import array

import numpy as np
from numba import carray
from torch import Tensor

from .cpu_numba import helper, pointer
from .sampling import SamplingTensors

_f32, _i32 = np.float32, np.int32
WORD_BITS = 32

_SEEN, _COUNTS, _REPETITION, _FREQUENCY, _PRESENCE = 0, 2, 3, 4, 5
_BIAS, _BIAS_VALUES, _BANNED, _ALLOWED, TABLE_LEN = 6, 8, 9, 11, 12
"""Places in the table; tokens that run by rows have two, the second for ``starts``."""


def edit_table(how: SamplingTensors) -> array[int] | None:
    """int64: addresses, 0 for what is absent. It holds no tensor alive. (A NumPy array takes longer to make.)"""
    if not how.edits:
        return None
    p, bias, banned = how.penalties, how.bias, how.banned
    tensors: list[Tensor | None] = [None] * TABLE_LEN
    if p is not None:
        tensors[:_BIAS] = (p.seen.tokens, p.seen.starts, p.counts, p.repetition, p.frequency, p.presence)
    if bias is not None:
        tensors[_BIAS:_BANNED] = (bias.runs.tokens, bias.runs.starts, bias.values)
    if banned is not None:
        tensors[_BANNED:_ALLOWED] = (banned.tokens, banned.starts)
    tensors[_ALLOWED] = how.allowed
    return array("q", [0 if tensor is None else tensor.data_ptr() for tensor in tensors])


@helper
def _run(table, place, row):
    """Where a row's tokens begin and end."""
    if table[place + 1] == 0:
        return _i32(0), _i32(0)
    starts = carray(pointer(table[place + 1]), (row + 2,), _i32)
    return starts[row], starts[row + 1]


@helper
def _words(table, row, vocab_size):
    """A row of the mask; none where there is no mask, or it allows everything."""
    size = (vocab_size + WORD_BITS - 1) // WORD_BITS if table[_ALLOWED] != 0 else 0
    words = carray(pointer(table[_ALLOWED] + 4 * row * size), (size,), _i32)
    common = _i32(-1)
    for i in range(size):
        common &= words[i]
    return words if common != -1 else words[:0]


@helper
def _copy_allowed(given, words, edited):
    """-inf where a bit is not set. Edits leave that as it is, so that it can come first."""
    whole = given.size // WORD_BITS
    for word in range(whole):
        bits, start = words[word], word * WORD_BITS
        for i in range(WORD_BITS):
            edited[start + i] = given[start + i] if (bits >> _i32(i)) & _i32(1) else _f32(-np.inf)
    for token in range(whole * WORD_BITS, given.size):
        is_allowed = (words[whole] >> _i32(token - whole * WORD_BITS)) & _i32(1)
        edited[token] = given[token] if is_allowed else _f32(-np.inf)


@helper
def _penalise(table, row, start, end, edited):
    tokens = carray(pointer(table[_SEEN]), (end,), _i32)
    counts = carray(pointer(table[_COUNTS]), (end,), _i32)
    repetition = carray(pointer(table[_REPETITION]), (row + 1,), _f32)[row]
    frequency = carray(pointer(table[_FREQUENCY]), (row + 1,), _f32)[row]
    presence = carray(pointer(table[_PRESENCE]), (row + 1,), _f32)[row]
    for i in range(start, end):
        x = edited[tokens[i]]
        x = x / repetition if x > 0 else x * repetition
        edited[tokens[i]] = x - counts[i] * frequency - (presence if counts[i] > 0 else _f32(0))


@helper
def edit(table, row, given, edited):
    """Whether the row has wishes; then ``edited`` is a copy of the logits with them."""
    seen, seen_end = _run(table, _SEEN, row)
    biased, biased_end = _run(table, _BIAS, row)
    banned, banned_end = _run(table, _BANNED, row)
    words = _words(table, row, given.size)
    if seen == seen_end and biased == biased_end and banned == banned_end and words.size == 0:
        return False
    if words.size > 0:
        _copy_allowed(given, words, edited)
    else:
        for token in range(given.size):  # a slice's assignment is slower
            edited[token] = given[token]
    if seen < seen_end:
        _penalise(table, row, seen, seen_end, edited)
    tokens = carray(pointer(table[_BIAS]), (biased_end,), _i32)
    values = carray(pointer(table[_BIAS_VALUES]), (biased_end,), _f32)
    for i in range(biased, biased_end):
        edited[tokens[i]] += values[i]
    tokens = carray(pointer(table[_BANNED]), (banned_end,), _i32)
    for i in range(banned, banned_end):
        edited[tokens[i]] = _f32(-np.inf)
    return True
