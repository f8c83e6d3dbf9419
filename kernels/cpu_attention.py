"""Paged attention on CPUs.

A sequence with few query tokens (decode, short chunks) reads its blocks in place: one task for each (sequence, KV
head) goes over the K and V tiles once for the whole group of query heads, with an online softmax (Milakov and
Gimelshein 2018; Dao 2022). A sequence with many query tokens is bound by arithmetic: its K and V are gathered once, and
torch's blocked attention does the rest.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, prange
from torch import Tensor

from . import reference
from .cpu_numba import Kernel, claim_threads, compile_kernel, fast_exp, helper, pointer
from .kv_cache import KVCache
from .reference import gather_sequence

SHORT_QUERY = 8
"""Most new tokens of a sequence whose blocks are read in place. At 8, gathering and torch take as long with 1,024 keys
and twice as long with 128; with more they win."""

TILE = 64
"""Keys per round of the online softmax: a K tile of 64 × 64 float32 is 16 KiB, half of a first-level cache."""

_f32 = np.float32


@helper
def _score(query, key, scores, column):
    for g in range(query.shape[0]):
        dot = _f32(0)
        for d in range(key.size):
            dot += query[g, d] * key[d]
        scores[g, column] = dot


@helper
def _soften(scores, num_keys, largest, total, attended):
    """Turns a tile's scores into weights relative to the largest so far; rescales what was summed before."""
    for g in range(scores.shape[0]):
        new_largest = largest[g]
        for j in range(num_keys):
            if scores[g, j] > new_largest:
                new_largest = scores[g, j]
        shrink = fast_exp(largest[g] - new_largest)
        largest[g] = new_largest
        weight_sum = _f32(0)
        for j in range(num_keys):
            scores[g, j] = fast_exp(scores[g, j] - new_largest)
            weight_sum += scores[g, j]
        total[g] = total[g] * shrink + weight_sum
        for d in range(attended.shape[1]):
            attended[g, d] *= shrink


@helper
def _accumulate(attended, value, weights, column):
    for g in range(attended.shape[0]):
        weight = weights[g, column]
        for d in range(value.size):
            attended[g, d] += weight * value[d]


@helper
def _attend(query, keys_at, values_at, table, head, heads, block_size, num_keys, group, head_dim, out):
    """One query position: query (scaled) and out ``[group, head_dim]``; table ``[max_blocks]``."""
    scores = np.empty((group, TILE), _f32)
    attended = np.zeros((group, head_dim), _f32)
    largest = np.full(group, _f32(-1e30))
    total = np.zeros(group, _f32)
    for start in range(0, num_keys, TILE):
        size = min(TILE, num_keys - start)
        for j in range(size):
            block, offset = table[(start + j) // block_size], (start + j) % block_size
            at = 4 * head_dim * ((block * heads + head) * block_size + offset)
            _score(query, carray(pointer(keys_at + at), (head_dim,), _f32), scores, j)
        _soften(scores, size, largest, total, attended)
        for j in range(size):
            block, offset = table[(start + j) // block_size], (start + j) % block_size
            at = 4 * head_dim * ((block * heads + head) * block_size + offset)
            _accumulate(attended, carray(pointer(values_at + at), (head_dim,), _f32), scores, j)
    for g in range(group):
        for d in range(head_dim):
            out[g, d] = attended[g, d] / total[g]


@functools.cache
def _build_short(head_dim: int, group: int, parallel: bool) -> Kernel:
    """The kernel for one head size and group: constants let LLVM unroll the inner loops."""

    def short(
        q_at,
        q_stride,
        k_at,
        v_at,
        tables_at,
        lens_at,
        starts_at,
        out_at,
        seqs,
        heads,
        block_size,
        max_blocks,
        scale,
        threads,
    ):
        seq_lens = carray(pointer(lens_at), (seqs,), np.int32)
        starts = carray(pointer(starts_at), (seqs + 1,), np.int32)
        workers = threads if parallel else 1
        for worker in prange(workers):
            query = np.empty((group, head_dim), _f32)
            for task in range(worker, seqs * heads, workers):
                seq, head = task // heads, task % heads
                table = carray(pointer(tables_at + 4 * seq * max_blocks), (max_blocks,), np.int32)
                first, end = np.int64(starts[seq]), np.int64(starts[seq + 1])
                if end - first > SHORT_QUERY:
                    continue
                for row in range(first, end):
                    at = 4 * head * group * head_dim
                    source = carray(pointer(q_at + 4 * row * q_stride + at), (group, head_dim), _f32)
                    for g in range(group):
                        for d in range(head_dim):
                            query[g, d] = source[g, d] * _f32(scale)
                    num_keys = np.int64(seq_lens[seq]) - (end - 1 - row)
                    out = carray(pointer(out_at + 4 * row * heads * group * head_dim + at), (group, head_dim), _f32)
                    _attend(query, k_at, v_at, table, head, heads, block_size, num_keys, group, head_dim, out)

    return compile_kernel(short, parallel=parallel)


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
    """See ``reference.paged_attention``. Blocks are read in place in float32 only; query may be a slice of rows."""
    out = torch.empty(query.shape, dtype=query.dtype) if out is None else out
    if cache.is_quantized or sliding_window is not None or soft_cap is not None:
        return reference.paged_attention(
            query,
            cache,
            block_tables,
            seq_lens,
            query_start_loc,
            scale=scale,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            out=out,
        )
    key_cache, value_cache = cache.key, cache.value
    in_place = query.dtype == key_cache.dtype == torch.float32
    if in_place:
        _attend_short(query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, scale, out)
    if in_place and max_query_len <= SHORT_QUERY:
        return out
    starts = query_start_loc.tolist()
    for index, (seq_len, start, end) in enumerate(zip(seq_lens.tolist(), starts[:-1], starts[1:], strict=True)):
        if end - start > (SHORT_QUERY if in_place else 0):
            keys = gather_sequence(key_cache, None, block_tables[index], seq_len)
            values = gather_sequence(value_cache, None, block_tables[index], seq_len)
            out[start:end] = _attend_long(query[start:end], keys, values, scale)
    return out


def _attend_short(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    _, heads, block_size, head_dim = key_cache.shape
    num_seqs, max_blocks = block_tables.shape
    threads = claim_threads()
    kernel = _build_short(head_dim, query.shape[1] // heads, threads > 1)
    kernel(
        query.data_ptr(),
        query.stride(0),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        block_tables.data_ptr(),
        seq_lens.data_ptr(),
        query_start_loc.data_ptr(),
        out.data_ptr(),
        num_seqs,
        heads,
        block_size,
        max_blocks,
        scale,
        threads,
    )


def _attend_long(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One sequence's last n tokens: query ``[n, num_query_heads, D]``, K and V ``[num_kv_heads, len, D]``."""
    num_queries, num_keys = query.shape[0], keys.shape[1]
    whole = num_queries == num_keys
    # torch's causal flag counts from the first key, ours from the last: with cached tokens before, it takes a mask.
    mask = None if whole else query.new_full((num_queries, num_keys), -torch.inf).triu_(num_keys - num_queries + 1)
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=whole,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)
