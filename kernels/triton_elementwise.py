"""RMS norm, of rows and of heads, rotary embedding and activation × gate in Triton: one pass over memory each."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ACT_BLOCK = 1024
SILU, GELU, GELU_ERF = (tl.constexpr(number) for number in range(3))


@triton.jit
def rms_norm_kernel(
    x,
    weight,
    residual,
    out,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One program for one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PADDED)
    inside = column < WIDTH
    dtype = x.dtype.element_ty
    total = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(dtype)
        tl.store(residual + row * residual_stride + column, rounded, mask=inside)
        total = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(total * total, axis=0) / WIDTH + eps)
    # Rounded before the weight where that is, as Hugging Face's Llama does.
    normed = (total * factor).to(weight.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, scaled.to(dtype), mask=inside)


@triton.jit
def normalise_heads(
    x, weight, eps, NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, HEADS_PADDED: tl.constexpr, WIDTH_PADDED: tl.constexpr
):
    """Norms one token's heads, which begin at ``x``, in place."""
    head = tl.arange(0, HEADS_PADDED)[:, None]
    dim = tl.arange(0, WIDTH_PADDED)[None, :]
    inside = (head < NUM_HEADS) & (dim < WIDTH)
    at = x + head * WIDTH + dim
    values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + eps)
    normed = (values * factor[:, None]).to(weight.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + dim, mask=dim < WIDTH, other=0.0).to(tl.float32)
    tl.store(at, scaled.to(x.dtype.element_ty), mask=inside)


@triton.jit
def norm_heads_kernel(
    query,
    key,
    query_weight,
    key_weight,
    query_stride,
    key_stride,
    eps,
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERY_PADDED: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
):
    """One program for one token."""
    token = tl.program_id(0).to(tl.int64)
    normalise_heads(query + token * query_stride, query_weight, eps, NUM_QUERY_HEADS, WIDTH, QUERY_PADDED, WIDTH_PADDED)
    normalise_heads(key + token * key_stride, key_weight, eps, NUM_KEY_HEADS, WIDTH, KEY_PADDED, WIDTH_PADDED)


@triton.jit
def rotate_heads(
    x,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """Rotates the first ``2 * HALF`` numbers of one token's heads, which begin at ``x``, in place."""
    head = tl.arange(0, HEADS_PADDED)[:, None]
    dim = tl.arange(0, HALF_PADDED)[None, :]
    inside = (head < NUM_HEADS) & (dim < HALF)
    low_at = x + head * WIDTH + dim
    low = tl.load(low_at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(low_at + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    tl.store(low_at, (low * cos - high * sin).to(dtype), mask=inside)
    tl.store(low_at + HALF, (high * cos + low * sin).to(dtype), mask=inside)


@triton.jit
def rotary_kernel(
    query,
    key,
    positions,
    cos_sin,
    query_stride,
    key_stride,
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    QUERY_PADDED: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """One program for one token."""
    token = tl.program_id(0).to(tl.int64)
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * 2 * HALF
    dim = tl.arange(0, HALF_PADDED)[None, :]
    cos = tl.load(angles + dim, mask=dim < HALF, other=0.0)
    sin = tl.load(angles + HALF + dim, mask=dim < HALF, other=0.0)
    rotate_heads(query + token * query_stride, cos, sin, NUM_QUERY_HEADS, WIDTH, HALF, QUERY_PADDED, HALF_PADDED)
    rotate_heads(key + token * key_stride, cos, sin, NUM_KEY_HEADS, WIDTH, HALF, KEY_PADDED, HALF_PADDED)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == SILU:
        activated = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == GELU:
        # (1 + tanh(y)) / 2 is the sigmoid of 2y.
        activated = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        activated = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return activated


@triton.jit
def act_mul_kernel(gate_up, out, gate_up_stride, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """One program for one block of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * gate_up_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    activated = activate(gate, ACTIVATION).to(dtype).to(tl.float32)
    tl.store(out + row * width + column, (activated * up).to(dtype), mask=inside)


def rms_norm_warps(width: int) -> int:
    """At most 1,024 elements a warp: a thread holds its part of the row in registers."""
    return max(4, min(int(triton.next_power_of_2(width)) // 1024, 16))


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See ``reference.rms_norm``; the new residual is in the residual's memory."""
    num_rows, width = x.shape
    out = torch.empty_like(x)
    total = x if residual is None else residual
    if num_rows > 0:
        rms_norm_kernel[(num_rows,)](
            x,
            weight,
            total,
            out,
            x.stride(0),
            total.stride(0),
            out.stride(0),
            eps,
            WIDTH=width,
            WIDTH_PADDED=triton.next_power_of_2(width),
            HAS_RESIDUAL=residual is not None,
            num_warps=rms_norm_warps(width),
        )
    return out, total


def norm_heads(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See ``reference.norm_heads``; works in place. A token's heads must lie side by side."""
    num_tokens, num_query_heads, width = query.shape
    if num_tokens > 0:
        norm_heads_kernel[(num_tokens,)](
            query,
            key,
            query_weight,
            key_weight,
            query.stride(0),
            key.stride(0),
            eps,
            NUM_QUERY_HEADS=num_query_heads,
            NUM_KEY_HEADS=key.shape[1],
            WIDTH=width,
            QUERY_PADDED=triton.next_power_of_2(num_query_heads),
            KEY_PADDED=triton.next_power_of_2(key.shape[1]),
            WIDTH_PADDED=triton.next_power_of_2(width),
        )
    return query, key


def rotary(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """See ``reference.rotary``; works in place. A token's heads must lie side by side."""
    num_tokens, num_query_heads, head_dim = query.shape
    if num_tokens > 0:
        rotary_kernel[(num_tokens,)](
            query,
            key,
            positions,
            cos_sin,
            query.stride(0),
            key.stride(0),
            NUM_QUERY_HEADS=num_query_heads,
            NUM_KEY_HEADS=key.shape[1],
            WIDTH=head_dim,
            HALF=cos_sin.shape[1] // 2,
            QUERY_PADDED=triton.next_power_of_2(num_query_heads),
            KEY_PADDED=triton.next_power_of_2(key.shape[1]),
            HALF_PADDED=triton.next_power_of_2(cos_sin.shape[1] // 2),
        )
    return query, key


def silu_mul(gate_up: Tensor) -> Tensor:
    """See ``reference.silu_mul``."""
    return _act_mul(gate_up, SILU)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See ``reference.gelu_mul``."""
    return _act_mul(gate_up, GELU)


def gelu_erf_mul(gate_up: Tensor) -> Tensor:
    """See ``reference.gelu_erf_mul``."""
    return _act_mul(gate_up, GELU_ERF)


def _act_mul(gate_up: Tensor, activation: tl.constexpr) -> Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_rows, width))
    if num_rows > 0:
        act_mul_kernel[(num_rows, triton.cdiv(width, ACT_BLOCK))](
            gate_up, out, gate_up.stride(0), width, ACTIVATION=activation.value, BLOCK=ACT_BLOCK
        )
    return out
