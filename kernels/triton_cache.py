"""Writing K and V to the paged cache, quantised where it is, and copying blocks, in Triton."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_cache import LARGEST, SMALLEST_SCALE, KVCache, KVPool

COPY_CHUNK = 8192
"""Bytes of a block that one program copies."""

ROUNDER = tl.constexpr(12582912.0)
"""1.5 × 2^23: a float32 that it is added to, and taken from again, is rounded to nearest even (below 2^22)."""


@triton.jit
def round_to_int8(x):
    return ((x + ROUNDER) - ROUNDER).to(tl.int8)


@triton.jit
def round_to_fp8(x):
    """float32, not beyond ±448, as the bits of the nearest fp8 e4m3, to even: also where a target lacks the type.

    Adding half of what is cut off, and one more where what stays is odd, rounds the 3 bits of the mantissa and carries
    into the exponent, whose bias goes from 127 to 7. Below 2^-6 lie the subnormals: multiples of 2^-9.
    """
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = ((magnitude * 512.0 + ROUNDER) - ROUNDER).to(tl.uint32)
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    return (code | tl.where(x < 0.0, 0x80, 0)).to(tl.uint8)


@triton.jit
def write_heads(
    source,
    cache,
    scales,
    head,
    dim,
    block,
    offset,
    cache_block_stride,
    cache_head_stride,
    scale_block_stride,
    scale_head_stride,
    LARGEST_VALUE: tl.constexpr,
    SMALLEST: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """One token's heads, ``[heads, dims]`` from ``source`` on. A cache with scales is int8, or fp8 e4m3 as bytes."""
    owned = head < NUM_HEADS
    inside = owned[:, None] & (dim < HEAD_DIM)[None, :]
    x = tl.load(source + head[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
    if scales is not None:
        x = x.to(tl.float32)
        # The largest by its bits, among which NaN's are the largest: as a float it would be passed over.
        largest = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)
        scale = tl.div_rn(largest, LARGEST_VALUE)
        scale = tl.where(scale < SMALLEST, SMALLEST, scale)
        tl.store(scales + block * scale_block_stride + head * scale_head_stride + offset, scale, mask=owned)
        x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        x = round_to_int8(x) if cache.dtype.element_ty == tl.int8 else round_to_fp8(x)
    target = block * cache_block_stride + head * cache_head_stride + offset * HEAD_DIM
    tl.store(cache + target[:, None] + dim[None, :], x, mask=inside)


@triton.jit
def write_kv_kernel(
    key,
    value,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    slots,
    key_stride,
    value_stride,
    cache_block_stride,
    cache_head_stride,
    scale_block_stride,
    scale_head_stride,
    LARGEST_VALUE: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Grid (tokens): one token's K and V, all heads. A negative slot is a padding row's."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, HEADS_PADDED)
    dim = tl.arange(0, DIM_PADDED)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    write_heads(
        key + token * key_stride, key_cache, key_scales, head, dim, block, offset, cache_block_stride,
        cache_head_stride, scale_block_stride, scale_head_stride, LARGEST_VALUE, SMALLEST, NUM_HEADS, HEAD_DIM,
    )  # fmt: skip
    write_heads(
        value + token * value_stride, value_cache, value_scales, head, dim, block, offset, cache_block_stride,
        cache_head_stride, scale_block_stride, scale_head_stride, LARGEST_VALUE, SMALLEST, NUM_HEADS, HEAD_DIM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_copies"])
def copy_blocks_kernel(data, copies, num_copies, block_bytes, num_blocks, CHUNK: tl.constexpr):
    """Grid (planes, chunks of a block): one chunk of all copies in one plane (a layer's K or V), in order.

    A block is a destination after it was a source, never before: a thread reads a byte before it writes over it.
    """
    plane = data + tl.program_id(0).to(tl.int64) * num_blocks * block_bytes
    byte = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = byte < block_bytes
    for index in range(num_copies):
        source = tl.load(copies + 2 * index).to(tl.int64)
        target = tl.load(copies + 2 * index + 1).to(tl.int64)
        content = tl.load(plane + source * block_bytes + byte, mask=inside)
        tl.store(plane + target * block_bytes + byte, content, mask=inside)


def write_kv(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """See ``reference.write_kv``. A token's heads must lie side by side in ``key`` and ``value``."""
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    key_cache, value_cache = cache.key, cache.value
    if key_cache.dtype == torch.float8_e4m3fn:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    scale_strides = (0, 0) if cache.key_scale is None else cache.key_scale.stride()[:2]
    write_kv_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        cache.key_scale,
        cache.value_scale,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        *scale_strides,
        LARGEST_VALUE=LARGEST.get(cache.key.dtype),
        SMALLEST=SMALLEST_SCALE,
        BLOCK_SIZE=key_cache.shape[2],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS_PADDED=triton.next_power_of_2(num_heads),
        DIM_PADDED=triton.next_power_of_2(head_dim),
    )


def copy_blocks(pool: KVPool, copies: Tensor) -> None:
    """See ``reference.copy_blocks``."""
    if copies.shape[0] == 0:
        return
    copies = copies.to(pool.data.device).contiguous()
    for tensor in pool.tensors():
        layers, two, num_blocks = tensor.shape[:3]
        block_bytes = tensor[0, 0, 0].numel() * tensor.element_size()
        copy_blocks_kernel[(layers * two, triton.cdiv(block_bytes, COPY_CHUNK))](
            tensor.view(torch.uint8), copies, copies.shape[0], block_bytes, num_blocks, CHUNK=COPY_CHUNK
        )
