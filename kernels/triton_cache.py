"""Writing K and V to the paged cache, and copying blocks, in Triton."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .kv_cache import KVCache, KVPool

COPY_CHUNK = 2048
"""Elements of a block that one program copies."""


@triton.jit
def write_kv_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_stride,
    value_stride,
    cache_block_stride,
    cache_head_stride,
    block_size,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """One program for one token: its K and V, all heads ``[HEADS_PADDED, DIM_PADDED]``."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, HEADS_PADDED)[:, None]
    dim = tl.arange(0, DIM_PADDED)[None, :]
    inside = (head < NUM_HEADS) & (dim < HEAD_DIM)
    source = head * HEAD_DIM + dim
    target = (slot // block_size) * cache_block_stride + head * cache_head_stride + (slot % block_size) * HEAD_DIM + dim
    tl.store(key_cache + target, tl.load(key + token * key_stride + source, mask=inside), mask=inside)
    tl.store(value_cache + target, tl.load(value + token * value_stride + source, mask=inside), mask=inside)


@triton.jit
def copy_blocks_kernel(cache, copies, num_copies, plane_stride, block_elements, CHUNK: tl.constexpr):
    """One program for one chunk of a block in one plane (layer, K or V); it does all copies, in order."""
    plane = cache + tl.program_id(0).to(tl.int64) * plane_stride
    element = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = element < block_elements
    for index in range(num_copies):
        source = tl.load(copies + 2 * index).to(tl.int64)
        target = tl.load(copies + 2 * index + 1).to(tl.int64)
        content = tl.load(plane + source * block_elements + element, mask=inside)
        tl.store(plane + target * block_elements + element, content, mask=inside)


def write_kv(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """See ``reference.write_kv``. A token's heads must lie side by side in ``key`` and ``value``."""
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    write_kv_kernel[(num_tokens,)](
        key,
        value,
        cache.key,
        cache.value,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        cache.key.stride(0),
        cache.key.stride(1),
        cache.key.shape[2],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS_PADDED=triton.next_power_of_2(num_heads),
        DIM_PADDED=triton.next_power_of_2(head_dim),
    )


def copy_blocks(pool: KVPool, copies: Tensor) -> None:
    """See ``reference.copy_blocks``."""
    kv_cache = pool.data
    num_layers = kv_cache.shape[0]
    block_elements = kv_cache[0, 0, 0].numel()
    if copies.shape[0] == 0:
        return
    copy_blocks_kernel[(2 * num_layers, triton.cdiv(block_elements, COPY_CHUNK))](
        kv_cache,
        copies.to(kv_cache.device).contiguous(),
        copies.shape[0],
        kv_cache.stride(1),
        block_elements,
        CHUNK=COPY_CHUNK,
    )
