"""Paged attention in Triton: prefill, chunks, decode and any mix of them in one launch.

A program takes ``BLOCK_Q`` query positions of one sequence and one KV head. The head's whole group of query heads is
packed into the rows of its matrix products, row m being position ``m // GROUP``, head ``m % GROUP``, so that each K and
V tile is read once for the group. It walks over the keys in tiles with an online softmax (Dao 2022) in float32; every
lane looks up its own block, so a tile need not divide a block.

The grid is sized without asking the device: sequence s owns the programs from ``start // BLOCK_Q + s`` on, start being
its first row, which is never too few; those that find nothing to do leave at once.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_cache import KVCache


@triton.jit
def find_sequence(starts, num_seqs, program, BLOCK_Q: tl.constexpr):
    """The last sequence whose first program is not after this one, by bisection."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // BLOCK_Q + middle <= program:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def attend_keys(
    query,
    key_cache,
    value_cache,
    table,
    positions,
    first_key,
    end_key,
    cache_block_stride,
    block_size,
    scale,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attention of the query rows to the keys first_key … end_key - 1.

    query ``[ROWS, DIM_PADDED]``, its rows at ``positions``; the caches begin at the KV head. Returns the weighted sum
    of values, not yet divided, each row's largest score (in powers of two) and its sum of weights.
    """
    dim = tl.arange(0, DIM_PADDED)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    for start in range(first_key, end_key, TILE):
        key_at = start + tl.arange(0, TILE)
        exists = key_at < end_key
        block = tl.load(table + key_at // block_size, mask=exists, other=0).to(tl.int64)
        slot = block * cache_block_stride + (key_at % block_size) * HEAD_DIM
        # Unwritten memory may hold NaN, and 0 × NaN is NaN: what does not exist is never loaded.
        inside = exists[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(key_cache + slot[:, None] + dim[None, :], mask=inside, other=0.0)
        value = tl.load(value_cache + slot[:, None] + dim[None, :], mask=inside, other=0.0)
        if UPCAST:
            key = key.to(tl.float32)
            value = value.to(tl.float32)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        visible = exists[None, :] & (key_at[None, :] <= positions[:, None])
        score = tl.where(visible, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, axis=1))
        # A row that has seen no key yet (a later segment than its position) has weights of 0, not NaN.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weight, axis=1)
        attended = attended * shrink[:, None]
        attended += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        largest = new_largest
    return attended, largest, total


@triton.jit
def paged_attention_kernel(
    query,
    key_cache,
    value_cache,
    out,
    tables,
    seq_lens,
    starts,
    scale,
    num_seqs,
    query_stride,
    out_stride,
    cache_block_stride,
    cache_head_stride,
    table_stride,
    block_size,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (query blocks, KV heads). ``scale`` holds log2(e), since weights are powers of two."""
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find_sequence(starts, num_seqs, program, BLOCK_Q)
    start = tl.load(starts + seq)
    num_queries = tl.load(starts + seq + 1) - start
    first = (program - (start // BLOCK_Q + seq)) * BLOCK_Q
    if first >= num_queries:
        return
    seq_len = tl.load(seq_lens + seq)
    row = tl.arange(0, ROWS)
    index = first + row // GROUP
    positions = seq_len - num_queries + index
    dim = tl.arange(0, DIM_PADDED)
    inside = ((row < BLOCK_Q * GROUP) & (index < num_queries))[:, None] & (dim < HEAD_DIM)[None, :]
    heads = (kv_head * GROUP + row % GROUP) * HEAD_DIM
    token = (start + index).to(tl.int64)
    q = tl.load(query + (token * query_stride + heads)[:, None] + dim[None, :], mask=inside, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    attended, _, total = attend_keys(
        q,
        key_cache + kv_head * cache_head_stride,
        value_cache + kv_head * cache_head_stride,
        tables + seq.to(tl.int64) * table_stride,
        positions,
        0,
        tl.minimum(seq_len, seq_len - num_queries + first + BLOCK_Q),
        cache_block_stride,
        block_size,
        scale,
        HEAD_DIM,
        DIM_PADDED,
        ROWS,
        TILE,
        UPCAST,
    )
    result = (attended / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (token * out_stride + heads)[:, None] + dim[None, :], result, mask=inside)


@dataclass(frozen=True)
class Launch:
    """Sizes that a launch is compiled for."""

    rows: int
    block_q: int
    tile: int
    num_warps: int


def choose_launch(group: int, max_query_len: int, element_bytes: int) -> Launch:
    """Few rows for decode, where memory is the limit; more for prefill, where it is arithmetic.

    A matrix product has at least 16 rows. Depends on host values that are the same when a captured graph is replayed.
    """
    rows = max(16 if max_query_len == 1 else 64, triton.next_power_of_2(group))
    return Launch(rows=rows, block_q=rows // group, tile=64 if element_bytes < 4 else 32, num_warps=4)


def paged_attention(
    query: Tensor,
    cache: KVCache,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See ``reference.paged_attention``. A token's heads must lie side by side in ``query`` and ``out``."""
    key_cache, value_cache = cache.key, cache.value
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    num_tokens, num_query_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[1]
    num_seqs = seq_lens.shape[0]
    group = num_query_heads // num_kv_heads
    if num_tokens == 0 or num_seqs == 0:
        return out
    launch = choose_launch(group, max_query_len, query.element_size())
    # Triton's interpreter, in which the tests run, keeps bfloat16 as integers and would multiply those.
    upcast = triton.knobs.runtime.interpret and query.dtype == torch.bfloat16
    paged_attention_kernel[(num_tokens // launch.block_q + num_seqs, num_kv_heads)](
        query,
        key_cache,
        value_cache,
        out,
        block_tables,
        seq_lens,
        query_start_loc,
        scale * math.log2(math.e),
        num_seqs,
        query.stride(0),
        out.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        block_tables.stride(0),
        key_cache.shape[2],
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM_PADDED=max(16, triton.next_power_of_2(head_dim)),
        ROWS=launch.rows,
        BLOCK_Q=launch.block_q,
        TILE=launch.tile,
        UPCAST=upcast,
        num_warps=launch.num_warps,
    )
    return out
