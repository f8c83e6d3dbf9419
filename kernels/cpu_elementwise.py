"""RMS norm, of rows and of heads, rotary embedding and activation × gate on CPUs: one pass over memory each, float32.

Other dtypes take the torch reference. Rows may lie apart (a slice of a fused projection); a row itself is contiguous.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from . import reference
from .cpu_numba import PARALLEL_ELEMENTS, fast_exp, fingerprint, helper, pointer
from .cpu_program import Launch, Team
from .cpu_team import compile_work, float_of_word, note_done, rows_at_once, take, word_of_float, words

ACTIVATION_COST = 4
"""Times that of an element of other elementwise work."""

_f32 = np.float32
_SILU, _GELU, _GELU_ERF = 0, 1, 2
_SLOPE = _f32(2 * math.sqrt(2 / math.pi))
_ROOT_HALF = _f32(math.sqrt(0.5))


@helper
def _add(total, x):
    for i in range(total.size):
        total[i] += x[i]


@helper
def _norm_row(x, weight, eps, out):
    squares = _f32(0)
    for i in range(x.size):
        squares += x[i] * x[i]
    factor = _f32(1) / math.sqrt(squares / _f32(x.size) + _f32(eps))
    for i in range(x.size):
        out[i] = x[i] * factor * weight[i]


@helper
def _rotate(low, high, cos, sin):
    for i in range(low.size):
        a, b = low[i], high[i]
        low[i] = a * cos[i] - b * sin[i]
        high[i] = b * cos[i] + a * sin[i]


@helper
def _silu(x):
    return x / (_f32(1) + fast_exp(min(-x, _f32(87))))


@helper
def _gelu(x):
    """(1 + tanh(y)) / 2 is the sigmoid of 2y."""
    return x / (_f32(1) + fast_exp(min(-_SLOPE * (x + _f32(0.044715) * x * x * x), _f32(87))))


@helper
def _gelu_erf(x):
    """The complement of erf to 1.5e-7: Abramowitz and Stegun 1964, formula 7.1.26."""
    z = abs(x) * _ROOT_HALF
    t = _f32(1) / (_f32(1) + _f32(0.3275911) * z)
    p = _f32(1.061405429) * t - _f32(1.453152027)
    p = p * t + _f32(1.421413741)
    p = p * t - _f32(0.284496736)
    p = p * t + _f32(0.254829592)
    below = _f32(0.5) * p * t * fast_exp(-z * z)
    return x * (below if x < 0 else _f32(1) - below)


@helper
def _act_mul_row(gate, up, out, activation):
    if activation == _SILU:
        for i in range(out.size):
            out[i] = _silu(gate[i]) * up[i]
    elif activation == _GELU:
        for i in range(out.size):
            out[i] = _gelu(gate[i]) * up[i]
    else:
        for i in range(out.size):
            out[i] = _gelu_erf(gate[i]) * up[i]


@functools.cache
def _rms_norm_work() -> Any:
    sources = fingerprint(__file__)

    def rms_norm(words_at, call_at, tally_at, member, team):
        _ = sources  # for the cache's key
        x_at, x_stride, weight_at, residual_at, residual_stride, out_at, width, eps = words(words_at, 8)
        (rows,) = words(call_at, 1)
        weight = carray(pointer(weight_at), (width,), _f32)
        at_once = rows_at_once(width)
        first, last = take(tally_at, rows, at_once)
        while first < last:
            for row in range(first, last):
                x = carray(pointer(x_at + 4 * row * x_stride), (width,), _f32)
                out = carray(pointer(out_at + 4 * row * width), (width,), _f32)
                if residual_at == 0:
                    _norm_row(x, weight, float_of_word(eps), out)
                else:
                    total = carray(pointer(residual_at + 4 * row * residual_stride), (width,), _f32)
                    _add(total, x)
                    _norm_row(total, weight, float_of_word(eps), out)
            note_done(tally_at, first, last)
            first, last = take(tally_at, rows, at_once)
        return rows

    return compile_work(rms_norm)


@functools.cache
def _norm_heads_work() -> Any:
    sources = fingerprint(__file__)

    def norm_heads(words_at, call_at, tally_at, member, team):
        _ = sources  # for the cache's key
        q_at, q_stride, q_heads, k_at, k_stride, k_heads = words(words_at, 6)
        q_weight_at, k_weight_at, width, eps = words(words_at + 48, 4)
        (rows,) = words(call_at, 1)
        at_once = rows_at_once(width * (q_heads + k_heads))
        first, last = take(tally_at, rows, at_once)
        while first < last:
            for row in range(first, last):
                for head in range(q_heads + k_heads):
                    if head < q_heads:
                        at, weight_at = q_at + 4 * (row * q_stride + head * width), q_weight_at
                    else:
                        at, weight_at = k_at + 4 * (row * k_stride + (head - q_heads) * width), k_weight_at
                    x = carray(pointer(at), (width,), _f32)
                    _norm_row(x, carray(pointer(weight_at), (width,), _f32), float_of_word(eps), x)
            note_done(tally_at, first, last)
            first, last = take(tally_at, rows, at_once)
        return rows

    return compile_work(norm_heads)


@functools.cache
def _rotary_work() -> Any:
    sources = fingerprint(__file__)

    def rotary(words_at, call_at, tally_at, member, team):
        _ = sources  # for the cache's key
        q_at, q_stride, q_heads, k_at, k_stride, k_heads = words(words_at, 6)
        positions_at, position_words, table_at, half, width = words(words_at + 48, 5)
        (rows,) = words(call_at, 1)
        positions = carray(pointer(positions_at), (rows * position_words,), np.int32)
        at_once = rows_at_once(2 * half * (q_heads + k_heads))
        first, last = take(tally_at, rows, at_once)
        while first < last:
            for row in range(first, last):
                cos_at = table_at + 8 * half * np.int64(positions[row * position_words])
                cos = carray(pointer(cos_at), (half,), _f32)
                sin = carray(pointer(cos_at + 4 * half), (half,), _f32)
                for head in range(q_heads + k_heads):
                    if head < q_heads:
                        at = q_at + 4 * (row * q_stride + head * width)
                    else:
                        at = k_at + 4 * (row * k_stride + (head - q_heads) * width)
                    low = carray(pointer(at), (half,), _f32)
                    high = carray(pointer(at + 4 * half), (half,), _f32)
                    _rotate(low, high, cos, sin)
            note_done(tally_at, first, last)
            first, last = take(tally_at, rows, at_once)
        return rows

    return compile_work(rotary)


@functools.cache
def _act_mul_work() -> Any:
    sources = fingerprint(__file__)

    def act_mul(words_at, call_at, tally_at, member, team):
        _ = sources  # for the cache's key
        gate_up_at, stride, out_at, width, activation, rows_of_token = words(words_at, 6)
        rows = words(call_at, 1)[0] * rows_of_token
        at_once = rows_at_once(ACTIVATION_COST * width)
        first, last = take(tally_at, rows, at_once)
        while first < last:
            for row in range(first, last):
                gate = carray(pointer(gate_up_at + 4 * row * stride), (width,), _f32)
                up = carray(pointer(gate_up_at + 4 * (row * stride + width)), (width,), _f32)
                out = carray(pointer(out_at + 4 * row * width), (width,), _f32)
                _act_mul_row(gate, up, out, activation)
            note_done(tally_at, first, last)
            first, last = take(tally_at, rows, at_once)
        return rows

    return compile_work(act_mul)


def rms_norm(
    team: Team, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See ``reference.rms_norm``; the new residual is in the residual's memory."""
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        team.must_not_record(f"a norm in {x.dtype}")
        return reference.rms_norm(x, weight, eps, residual)
    rows, width = x.shape
    out = team.empty(rows, width)
    of_residual = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    at = x.data_ptr(), x.stride(0), weight.data_ptr(), *of_residual, out.data_ptr(), width, word_of_float(eps)
    team.run([Launch(_rms_norm_work().address, at)], rows, is_small=rows * width < PARALLEL_ELEMENTS)
    return out, x if residual is None else residual


def norm_heads(
    team: Team, query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See ``reference.norm_heads``; works in place."""
    if query.dtype != torch.float32 or query_weight.dtype != torch.float32:
        team.must_not_record(f"a norm of heads in {query.dtype}")
        return reference.norm_heads(query, key, query_weight, key_weight, eps)
    rows, q_heads, width = query.shape
    k_heads = key.shape[1]
    heads = query.data_ptr(), query.stride(0), q_heads, key.data_ptr(), key.stride(0), k_heads
    at = query_weight.data_ptr(), key_weight.data_ptr(), width, word_of_float(eps)
    is_small = rows * (q_heads + k_heads) * width < PARALLEL_ELEMENTS
    team.run([Launch(_norm_heads_work().address, (*heads, *at))], rows, is_small=is_small)
    return query, key


def rotary(team: Team, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """See ``reference.rotary``; works in place."""
    if query.dtype != torch.float32:
        team.must_not_record(f"rotary positions in {query.dtype}")
        return reference.rotary(query, key, positions, cos_sin)
    rows, q_heads, head_dim = query.shape
    k_heads = key.shape[1]
    heads = query.data_ptr(), query.stride(0), q_heads, key.data_ptr(), key.stride(0), k_heads
    at = positions.data_ptr(), positions.element_size() // 4, cos_sin.data_ptr(), cos_sin.shape[1] // 2, head_dim
    is_small = rows * (q_heads + k_heads) * head_dim < PARALLEL_ELEMENTS
    team.run([Launch(_rotary_work().address, (*heads, *at))], rows, is_small=is_small)
    return query, key


def silu_mul(team: Team, gate_up: Tensor) -> Tensor:
    """See ``reference.silu_mul``."""
    return _act_mul(team, gate_up, _SILU, reference.silu_mul)


def gelu_mul(team: Team, gate_up: Tensor) -> Tensor:
    """See ``reference.gelu_mul``."""
    return _act_mul(team, gate_up, _GELU, reference.gelu_mul)


def gelu_erf_mul(team: Team, gate_up: Tensor) -> Tensor:
    """See ``reference.gelu_erf_mul``."""
    return _act_mul(team, gate_up, _GELU_ERF, reference.gelu_erf_mul)


def _act_mul(team: Team, gate_up: Tensor, activation: int, otherwise: Callable[[Tensor], Tensor]) -> Tensor:
    if gate_up.dtype != torch.float32:
        team.must_not_record(f"an activation in {gate_up.dtype}")
        return otherwise(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = team.empty(rows, width)
    launch = _act_mul_launch(gate_up, out, activation)
    team.run([launch], rows, is_small=rows * width < PARALLEL_ELEMENTS)
    return out


def silu_mul_launch(gate_up: Tensor, out: Tensor, rows_of_token: int) -> Launch:
    """For so many rows of each of the call's: ``out [rows, I]`` of ``gate_up [rows, 2 * I or more]``, float32."""
    return _act_mul_launch(gate_up, out, _SILU, rows_of_token)


def _act_mul_launch(gate_up: Tensor, out: Tensor, activation: int, rows_of_token: int = 1) -> Launch:
    at = gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), out.shape[1], activation, rows_of_token
    return Launch(_act_mul_work().address, at)
