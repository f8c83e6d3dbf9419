"""The inputs of products by narrow weights on CPUs: rounded to bfloat16, or each row quantised by its largest value."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from .cpu_columns import Finish
from .cpu_numba import bits_of_float, exact_helper, fingerprint, largest_magnitude, pointer
from .cpu_program import Launch, Team
from .cpu_team import compile_work, note_done, rows_at_once, take, words
from .kv_cache import SMALLEST_SCALE
from .quantized import DIGIT_RATIO, LARGEST_INT8, Int8Weight

_f32, _i32 = np.float32, np.int32
_LARGEST, _SMALLEST_SCALE, _RATIO = _f32(LARGEST_INT8), _f32(SMALLEST_SCALE), _f32(DIGIT_RATIO)


@exact_helper
def quantize_row(x, out):
    """The scale; ``out`` is filled up with zeros. Of a row with NaN the scale is NaN, and so is its product."""
    scale = largest_magnitude(x) / _LARGEST
    if scale < _SMALLEST_SCALE:
        scale = _SMALLEST_SCALE
    for i in range(x.size):
        out[i] = np.int32(np.rint(x[i] / scale))
    for i in range(x.size, out.size):
        out[i] = 0
    return scale


@exact_helper
def quantize_rest(x, scale, first, out):
    """The second digits of a row, see ``Int8Weight.input_digits``; their scale."""
    unit = scale / _RATIO
    for i in range(x.size):
        out[i] = np.int32(np.rint((x[i] - scale * np.float32(first[i])) / unit))
    for i in range(x.size, out.size):
        out[i] = 0
    return unit


@functools.cache
def _quantize(dtype: torch.dtype) -> Any:
    sources, size = fingerprint(__file__), dtype.itemsize
    element = np.int8 if dtype == torch.int8 else np.int16

    def quantize(words_at, call_at, tally_at, member, team):
        _ = sources  # for the cache's key
        x_at, x_stride, width, digits, values_at, depth, scales_at = words(words_at, 7)
        (rows,) = words(call_at, 1)
        scales = carray(pointer(scales_at), (digits * rows,), _f32)
        at_once = rows_at_once(width)
        begin, end = take(tally_at, rows, at_once)
        while begin < end:
            for row in range(begin, end):
                x = carray(pointer(x_at + row * x_stride), (width,), _f32)
                first = carray(pointer(values_at + size * row * depth), (depth,), element)
                scales[row] = quantize_row(x, first)
                if digits == 2:
                    second = carray(pointer(values_at + size * (rows + row) * depth), (depth,), element)
                    scales[rows + row] = quantize_rest(x, scales[row], first, second)
            note_done(tally_at, begin, end)
            begin, end = take(tally_at, rows, at_once)
        return rows

    return compile_work(quantize, exact=True)


class QuantizedRows(NamedTuple):
    """What a product reads: see ``quantize_launch``."""

    values: Tensor
    """int8 or int16 ``[digits * T, depth]``"""
    scales: Tensor
    """float32 ``[digits * T]``"""


def quantize_launch(
    team: Team, x: Tensor, digits: int, depth: int, *, multiple: int = 1, dtype: torch.dtype = torch.int8
) -> tuple[Launch, QuantizedRows]:
    """Quantises rows of float32 ``x [T, in]`` to ``depth`` columns, zeros behind the last input; and where to.

    There is room for a multiple of rows. Second digits are T rows behind first ones.
    """
    num_rows = digits * x.shape[0]
    values = team.empty(-(-num_rows // multiple) * multiple, depth, dtype=dtype)
    scales = team.empty(values.shape[0])
    at = x.data_ptr(), 4 * x.stride(0), x.shape[1], digits, values.data_ptr(), depth, scales.data_ptr()
    return Launch(_quantize(dtype).address, at), QuantizedRows(values, scales)


@exact_helper
def _round_row(x, out):
    """To the nearest bfloat16, ties to even: a float32's upper 16 bits. NaN stays NaN."""
    for i in range(x.size):
        bits = bits_of_float(x[i])
        rounded = bits + _i32(0x7FFF) + ((bits >> _i32(16)) & _i32(1))
        out[i] = np.int16((bits | _i32(0x400000) if x[i] != x[i] else rounded) >> _i32(16))
    for i in range(x.size, out.size):
        out[i] = 0


@functools.cache
def _round() -> Any:
    sources = fingerprint(__file__)

    def round_rows(words_at, call_at, tally_at, member, team):
        _ = sources  # for the cache's key
        x_at, x_stride, width, values_at, depth = words(words_at, 5)
        (rows,) = words(call_at, 1)
        first, last = take(tally_at, rows, rows_at_once(width))
        while first < last:
            for row in range(first, last):
                x = carray(pointer(x_at + row * x_stride), (width,), _f32)
                _round_row(x, carray(pointer(values_at + 2 * row * depth), (depth,), np.int16))
            note_done(tally_at, first, last)
            first, last = take(tally_at, rows, rows_at_once(width))
        return rows

    return compile_work(round_rows, exact=True)


def round_launch(team: Team, x: Tensor, depth: int, *, multiple: int = 1) -> tuple[Launch, Tensor]:
    """Rounds rows of float32 ``x [T, in]`` to bfloat16 ``[T, depth]``, zeros behind the last input; and where to.

    There is room for a multiple of rows.
    """
    values = team.empty(-(-x.shape[0] // multiple) * multiple, depth, dtype=torch.bfloat16)
    at = x.data_ptr(), 4 * x.stride(0), x.shape[1], values.data_ptr(), depth
    return Launch(_round().address, at), values


def finish_int8(team: Team, weight: Int8Weight, bias: Tensor | None) -> tuple[Tensor | None, Finish]:
    """The bias that is added to each row, and what its product ends with: with two digits a bias comes last."""
    is_early = weight.input_digits == 1
    late = None if is_early else bias
    return bias if is_early else None, Finish(team, weight.values.shape[0], weight.input_digits, late)
