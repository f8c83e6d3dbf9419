"""RMS norm, rotary embedding and activation × gate on CPUs: one pass over memory each, float32.

Other dtypes take the torch reference. Rows may lie apart (a slice of a fused projection); a row itself is contiguous.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math

import numpy as np
import torch
from numba import carray, prange
from torch import Tensor

from . import reference
from .cpu_numba import PARALLEL_ELEMENTS, Kernel, claim_threads, compile_kernel, fast_exp, fingerprint, helper, pointer

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


def _build_rms_norm(parallel: bool) -> Kernel:
    sources = fingerprint(__file__)

    def rms_norm(x_at, x_stride, weight_at, residual_at, residual_stride, out_at, rows, width, eps, threads):
        _ = sources  # for the cache's key
        weight = carray(pointer(weight_at), (width,), _f32)
        workers = threads if parallel else 1
        for worker in prange(workers):
            for row in range(worker, rows, workers):
                x = carray(pointer(x_at + 4 * row * x_stride), (width,), _f32)
                out = carray(pointer(out_at + 4 * row * width), (width,), _f32)
                if residual_at == 0:
                    _norm_row(x, weight, eps, out)
                else:
                    total = carray(pointer(residual_at + 4 * row * residual_stride), (width,), _f32)
                    _add(total, x)
                    _norm_row(total, weight, eps, out)

    return compile_kernel(rms_norm, parallel=parallel)


def _build_rotary(parallel: bool) -> Kernel:
    sources = fingerprint(__file__)

    def rotary(
        q_at, q_stride, q_heads, k_at, k_stride, k_heads, positions_at, position_words, table_at, rows, half, threads
    ):
        _ = sources  # for the cache's key
        positions = carray(pointer(positions_at), (rows * position_words,), np.int32)
        workers = threads if parallel else 1
        for worker in prange(workers):
            for row in range(worker, rows, workers):
                cos_at = table_at + 8 * half * np.int64(positions[row * position_words])
                cos = carray(pointer(cos_at), (half,), _f32)
                sin = carray(pointer(cos_at + 4 * half), (half,), _f32)
                for head in range(q_heads + k_heads):
                    if head < q_heads:
                        at = q_at + 4 * (row * q_stride + 2 * head * half)
                    else:
                        at = k_at + 4 * (row * k_stride + 2 * (head - q_heads) * half)
                    low = carray(pointer(at), (half,), _f32)
                    high = carray(pointer(at + 4 * half), (half,), _f32)
                    _rotate(low, high, cos, sin)

    return compile_kernel(rotary, parallel=parallel)


def _build_act_mul(parallel: bool) -> Kernel:
    sources = fingerprint(__file__)

    def act_mul(gate_up_at, stride, out_at, rows, width, activation, threads):
        _ = sources  # for the cache's key
        workers = threads if parallel else 1
        for worker in prange(workers):
            for row in range(worker, rows, workers):
                gate = carray(pointer(gate_up_at + 4 * row * stride), (width,), _f32)
                up = carray(pointer(gate_up_at + 4 * (row * stride + width)), (width,), _f32)
                out = carray(pointer(out_at + 4 * row * width), (width,), _f32)
                _act_mul_row(gate, up, out, activation)

    return compile_kernel(act_mul, parallel=parallel)


_RMS_NORM = {parallel: _build_rms_norm(parallel) for parallel in (False, True)}
_ROTARY = {parallel: _build_rotary(parallel) for parallel in (False, True)}
_ACT_MUL = {parallel: _build_act_mul(parallel) for parallel in (False, True)}


def _threads_for(num_elements: int) -> int:
    return 1 if num_elements < PARALLEL_ELEMENTS else claim_threads()


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See ``reference.rms_norm``; the new residual is in the residual's memory."""
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return reference.rms_norm(x, weight, eps, residual)
    rows, width = x.shape
    out = torch.empty_like(x)
    at, stride = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    threads = _threads_for(rows * width)
    kernel = _RMS_NORM[threads > 1]
    kernel(x.data_ptr(), x.stride(0), weight.data_ptr(), at, stride, out.data_ptr(), rows, width, eps, threads)
    return out, x if residual is None else residual


def rotary(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """See ``reference.rotary``; works in place."""
    if query.dtype != torch.float32:
        return reference.rotary(query, key, positions, cos_sin)
    rows, q_heads, head_dim = query.shape
    k_heads = key.shape[1]
    threads = _threads_for(rows * (q_heads + k_heads) * head_dim)
    _ROTARY[threads > 1](
        query.data_ptr(),
        query.stride(0),
        q_heads,
        key.data_ptr(),
        key.stride(0),
        k_heads,
        positions.data_ptr(),
        positions.element_size() // 4,
        cos_sin.data_ptr(),
        rows,
        head_dim // 2,
        threads,
    )
    return query, key


def silu_mul(gate_up: Tensor) -> Tensor:
    """See ``reference.silu_mul``."""
    return _act_mul(gate_up, _SILU) if gate_up.dtype == torch.float32 else reference.silu_mul(gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See ``reference.gelu_mul``."""
    return _act_mul(gate_up, _GELU) if gate_up.dtype == torch.float32 else reference.gelu_mul(gate_up)


def gelu_erf_mul(gate_up: Tensor) -> Tensor:
    """See ``reference.gelu_erf_mul``."""
    return _act_mul(gate_up, _GELU_ERF) if gate_up.dtype == torch.float32 else reference.gelu_erf_mul(gate_up)


def _act_mul(gate_up: Tensor, activation: int) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    threads = _threads_for(rows * width)
    _ACT_MUL[threads > 1](gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, width, activation, threads)
    return out
