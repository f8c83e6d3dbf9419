"""The online softmax of attention on CPUs: rows of scores of one tile become weights, and earlier sums are rescaled.

Milakov and Gimelshein 2018; Dao 2022. Scores are in units of ln 2, so that weights are powers of two. What is
subtracted from a row's scores is not the largest so far but a *bound*: what was the largest, plus ``HEADROOM``, when it
was raised last. Larger scores mostly fit below it, so that sums are seldom rescaled, and exponents are at most 0. The
sum of weights is kept in lanes, which are added up once, when all keys are done.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from .cpu_llvm import F32, I32, I64, constant, load, plus, splat, store, vector_of
from .cpu_numba import fast_exp, helper, pointer
from .cpu_vectors import LANES, fold, larger, largest_of, multiply_add

TILE = 64
"""Keys per round: a K tile of 64 × 64 float32 is 16 KiB, half of a first-level cache or less."""

LOG2_E = math.log2(math.e)
"""Scores, and what caps them, are multiplied by this."""

HEADROOM = np.float32(8)
"""The largest weight under a new bound is 1/256: sums keep all their digits."""

LOWEST_EXPONENT = -100
"""Smaller weights, and those of keys that are not visible, are this power of two: nothing beside the others, but their
products are no denormal numbers, which processors are slow with."""

POWER = (1.0, 6.931437211e-01, 2.401801429e-01, 5.529735822e-02, 9.205798123e-03, 9.449036286e-04)
"""2^x for -1 < x <= 0, by powers of x. Of those that are exact at 0 it has the least relative error, 8.4e-8 (found by
Lawson's algorithm)."""

_f32 = np.float32
_floats, _ints = vector_of(F32, LANES), vector_of(I32, LANES)
_HIDDEN = _f32(-1e30)
NO_BOUND = _f32(-1e29)
"""Of a row that has seen no key. Hidden scores are far below it, too."""


@helper
def power_of_two(x):
    """float32 2^x for x <= 0."""
    return fast_exp(x * _f32(math.log(2)))


@helper
def soften(scores_at, num_rows, bound_at, total_at, attended_at, head_dim):
    """Turns rows of ``TILE`` scores into weights, adds those to total, and rescales what was summed before if need be.

    Float32, by address: scores ``[num_rows, TILE]``; bound ``[num_rows]``; total ``[num_rows, LANES]``; attended
    ``[num_rows, head_dim]``.
    """
    if largest_excess(scores_at, num_rows, bound_at) > 0:
        for row in range(num_rows):
            _raise_bound(
                scores_at + 4 * TILE * row,
                bound_at + 4 * row,
                total_at + 4 * LANES * row,
                attended_at + 4 * head_dim * row,
                head_dim,
            )
    weigh(scores_at, num_rows, bound_at, total_at)


@helper
def _raise_bound(scores_at, bound_at, total_at, attended_at, head_dim):
    bound = carray(pointer(bound_at), (1,), _f32)
    before, largest = bound[0], largest_of(scores_at, TILE)
    if largest > before:
        bound[0] = largest + HEADROOM
        if before > NO_BOUND:  # else all sums are 0
            shrink = power_of_two(before - bound[0])
            multiply(total_at, LANES, shrink)
            multiply(attended_at, head_dim, shrink)


@helper
def multiply(row_at, width, factor):
    row = carray(pointer(row_at), (width,), _f32)
    for i in range(width):
        row[i] *= factor


@helper
def cap_scores(scores_at, num_rows, soft_cap):
    """c × tanh(s / c), tanh(x) as 1 - 2 / (exp(2x) + 1)."""
    scores = carray(pointer(scores_at), (num_rows * TILE,), _f32)
    factor = _f32(2) / soft_cap
    for j in range(num_rows * TILE):
        power = fast_exp(min(scores[j] * factor, _f32(40)))
        scores[j] = soft_cap - _f32(2) * soft_cap / (power + _f32(1))


def _row(builder: Any, address: Any, row: Any, width: int) -> Any:
    return builder.add(address, builder.mul(row, I64(4 * width)))


def _load_row(builder: Any, address: Any, row: Any) -> list[Any]:
    """A row of scores, in vectors."""
    start = _row(builder, address, row, TILE)
    return [load(builder, plus(builder, start, 4 * at), _floats) for at in range(0, TILE, LANES)]


def _load_splat(builder: Any, address: Any, row: Any) -> Any:
    return splat(builder, load(builder, _row(builder, address, row, 1), F32), LANES)


@intrinsic
def largest_excess(typing_context: Any, scores_at: Any, num_rows: Any, bound_at: Any) -> Any:
    """How much a score is above its row's bound, at most over some rows: of which most often none is."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, num_rows, bound = arguments
        pick = functools.partial(larger, builder)
        most = cgutils.alloca_once(builder, _floats)
        builder.store(constant(F32, LANES, float(_HIDDEN)), most)
        with cgutils.for_range(builder, num_rows) as loop:
            largest = functools.reduce(pick, _load_row(builder, scores, loop.index))
            excess = builder.fsub(largest, _load_splat(builder, bound, loop.index))
            builder.store(pick(excess, builder.load(most)), most)
        return builder.extract_element(fold(builder, pick, builder.load(most), 1), I32(0))

    return types.float32(types.int64, types.int64, types.int64), generate


@intrinsic
def sum_of_lanes(typing_context: Any, total_at: Any) -> Any:
    """LANES float32, added up."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        total = fold(builder, builder.fadd, load(builder, arguments[0], _floats), 1)
        return builder.extract_element(total, I32(0))

    return types.float32(types.int64), generate


@intrinsic
def hide_scores(typing_context: Any, scores_at: Any, low: Any, high: Any) -> Any:
    """All of a row's scores but those from low to high: what is in memory there does not matter."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        low, high = (splat(builder, builder.trunc(edge, I32), LANES) for edge in arguments[1:])
        for index, score in enumerate(_load_row(builder, arguments[0], I64(0))):
            keys = ir.Constant(_ints, list(range(LANES * index, LANES * (index + 1))))
            is_seen = builder.and_(builder.icmp_signed("<=", low, keys), builder.icmp_signed("<", keys, high))
            shown = builder.select(is_seen, score, constant(F32, LANES, float(_HIDDEN)))
            store(builder, shown, plus(builder, arguments[0], 4 * LANES * index))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def weigh(typing_context: Any, scores_at: Any, num_rows: Any, bound_at: Any, total_at: Any) -> Any:
    """Scores become powers of two of what they are above their row's bound, which are added to total's lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, num_rows, bounds, totals = arguments
        with cgutils.for_range(builder, num_rows) as loop:
            bound = _load_splat(builder, bounds, loop.index)
            total_at = _row(builder, totals, loop.index, LANES)
            total = load(builder, total_at, _floats)
            start = _row(builder, scores, loop.index, TILE)
            for index, score in enumerate(_load_row(builder, scores, loop.index)):
                weight = _power_of_two(builder, builder.fsub(score, bound))
                store(builder, weight, plus(builder, start, 4 * LANES * index))
                total = builder.fadd(total, weight)
            store(builder, total, total_at)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


def _power_of_two(builder: Any, exponent: Any) -> Any:
    """2^x for x <= 0: of the fraction by a polynomial, of the rest by adding to the bits of the result's exponent."""
    exponent = larger(builder, exponent, constant(F32, LANES, LOWEST_EXPONENT))
    whole = builder.fptosi(exponent, _ints)
    fraction = builder.fsub(exponent, builder.sitofp(whole, _floats))
    power = constant(F32, LANES, POWER[-1])
    for coefficient in reversed(POWER[:-1]):
        power = multiply_add(builder, power, fraction, constant(F32, LANES, coefficient))
    bits = builder.add(builder.bitcast(power, _ints), builder.shl(whole, constant(I32, LANES, 23)))
    return builder.bitcast(bits, _floats)
