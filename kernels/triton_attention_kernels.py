"""The kernels of paged attention. ``triton_attention.py`` launches them, ``triton_attention_launch.py`` sizes them.

A program takes ``BLOCK_Q`` query positions of one sequence and one KV head. The head's whole group of query heads is
packed into the rows of its matrix products, row m being position ``m // GROUP``, head ``m % GROUP``, so that each K and
V tile is read once for the group. It walks over the keys in tiles with an online softmax (Dao 2022) in float32; every
lane looks up its own block, so a tile need not divide a block.

Where a batch alone would not fill the machine, the keys of a sequence are divided over ``NUM_SPLITS`` programs, whose
partial results lie in float32 until ``reduce_splits_kernel`` adds them up (Flash-Decoding: Dao et al. 2023).
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from .triton_attention_tiles import NO_SCORE, VALUE_GAIN, attend_tiles, first_tile, split_keys


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


@triton.jit(do_not_specialize=["num_seqs", "fewest_queries", "most_queries", "sliding_window", "table_stride"])
def paged_attention_kernel(
    query,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    out,
    partial,
    partial_sums,
    tables,
    seq_lens,
    starts,
    sliding_window,
    cap_scale,
    score_scale,
    num_seqs,
    fewest_queries,
    most_queries,
    query_stride,
    out_stride,
    cache_block_stride,
    cache_head_stride,
    scale_block_stride,
    scale_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    FULL_TILES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (query blocks, KV heads, splits). Serves the sequences with fewest_queries … most_queries queries.

    With ``ONE_BLOCK`` a sequence has one query block, that of its number; else sequence s owns the blocks from
    ``start // BLOCK_Q + s`` on, start being its first row, which is never too few. ``score_scale`` holds log2(e), since
    weights are powers of two. ``cap_scale`` and ``sliding_window`` may be None, as are the scales of a plain cache.
    With splits the result goes to ``partial`` float32 ``[num_seqs × BLOCK_Q, heads, NUM_SPLITS, HEAD_DIM]`` and
    ``partial_sums`` float32 ``[num_seqs × BLOCK_Q, heads, 2, NUM_SPLITS]`` (largest score, sum of weights).
    """
    kv_head = tl.program_id(1)
    if ONE_BLOCK:
        seq = tl.program_id(0)
        first_block = seq
        program = seq
    else:
        # Later query blocks see more keys: the longest work comes first.
        program = tl.num_programs(0) - 1 - tl.program_id(0)
        seq = find_sequence(starts, num_seqs, program, BLOCK_Q)
        first_block = tl.load(starts + seq) // BLOCK_Q + seq
    start = tl.load(starts + seq)
    num_queries = tl.load(starts + seq + 1) - start
    first = (program - first_block) * BLOCK_Q
    if (first >= num_queries) | (num_queries < fewest_queries) | (num_queries > most_queries):
        return
    seq_len = tl.load(seq_lens + seq)
    first_position = seq_len - num_queries + first
    end_key = tl.minimum(seq_len, first_position + BLOCK_Q)
    begin = first_tile(first_position, sliding_window, TILE)
    end = end_key
    if NUM_SPLITS > 1:
        keys = split_keys(end_key - begin, TILE, NUM_SPLITS)
        begin += tl.program_id(2) * keys
        end = tl.minimum(end_key, begin + keys)
        if begin >= end:
            return
    oldest_key = 0
    if sliding_window is not None:
        oldest_key = first_position + 1 - sliding_window

    row = tl.arange(0, ROWS)
    index = first + row // GROUP
    positions = seq_len - num_queries + index
    dim = tl.arange(0, DIM_PADDED)
    owned = (row < BLOCK_Q * GROUP) & (index < num_queries)
    inside = owned[:, None] & (dim < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + row % GROUP
    token = (start + index).to(tl.int64)
    q = tl.load(query + (token * query_stride + heads * HEAD_DIM)[:, None] + dim[None, :], mask=inside, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    attended = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    largest = tl.full([ROWS], NO_SCORE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    key_cache += kv_head.to(tl.int64) * cache_head_stride
    value_cache += kv_head.to(tl.int64) * cache_head_stride
    if key_scales is not None:
        key_scales += kv_head.to(tl.int64) * scale_head_stride
        value_scales += kv_head.to(tl.int64) * scale_head_stride
    table = tables + seq.to(tl.int64) * table_stride
    masked_from = begin
    if FULL_TILES:
        # Tiles that every row sees whole need no mask: those that end before the first row's position, and begin
        # inside of the last row's window.
        full_begin = begin
        if sliding_window is not None:
            full_begin = tl.maximum(begin, tl.cdiv(end_key - sliding_window, TILE) * TILE)
            full_begin = tl.minimum(full_begin, end)
            attended, largest, total = attend_tiles(
                attended, largest, total, q, key_cache, value_cache, key_scales, value_scales, table, positions,
                begin, full_begin, oldest_key, sliding_window, cap_scale, score_scale, cache_block_stride,
                scale_block_stride, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, TILE, True,
            )  # fmt: skip
        masked_from = tl.maximum(full_begin, tl.minimum(end, first_position + 1) // TILE * TILE)
        attended, largest, total = attend_tiles(
            attended, largest, total, q, key_cache, value_cache, key_scales, value_scales, table, positions,
            full_begin, masked_from, oldest_key, sliding_window, cap_scale, score_scale, cache_block_stride,
            scale_block_stride, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, TILE, False,
        )  # fmt: skip
    attended, largest, total = attend_tiles(
        attended, largest, total, q, key_cache, value_cache, key_scales, value_scales, table, positions,
        masked_from, end, oldest_key, sliding_window, cap_scale, score_scale, cache_block_stride,
        scale_block_stride, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, TILE, True,
    )  # fmt: skip
    if value_scales is not None:
        attended *= 1.0 / VALUE_GAIN
    if NUM_SPLITS == 1:
        result = (attended / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + (token * out_stride + heads * HEAD_DIM)[:, None] + dim[None, :], result, mask=inside)
    else:
        cell = (seq.to(tl.int64) * BLOCK_Q + index) * (tl.num_programs(1) * GROUP) + heads
        split = tl.program_id(2)
        at = (cell * NUM_SPLITS + split) * HEAD_DIM
        tl.store(partial + at[:, None] + dim[None, :], attended, mask=inside)
        sums = partial_sums + cell * 2 * NUM_SPLITS + split
        tl.store(sums, largest, mask=owned)
        tl.store(sums + NUM_SPLITS, total, mask=owned)


@triton.jit(do_not_specialize=["most_queries", "sliding_window"])
def reduce_splits_kernel(
    partial,
    partial_sums,
    out,
    seq_lens,
    starts,
    sliding_window,
    most_queries,
    out_stride,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (sequences, query heads, queries): adds up one query's splits, ``CHUNK`` at a time."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    index = tl.program_id(2)
    start = tl.load(starts + seq)
    num_queries = tl.load(starts + seq + 1) - start
    if (index >= num_queries) | (num_queries > most_queries):
        return
    seq_len = tl.load(seq_lens + seq)
    num_keys = seq_len - first_tile(seq_len - num_queries, sliding_window, TILE)
    num_splits = tl.cdiv(num_keys, split_keys(num_keys, TILE, NUM_SPLITS))
    cell = (seq.to(tl.int64) * BLOCK_Q + index) * tl.num_programs(1) + head
    sums = partial_sums + cell * 2 * NUM_SPLITS
    split = tl.arange(0, NUM_SPLITS)
    largest = tl.load(sums + split, mask=split < num_splits, other=NO_SCORE)
    weights = tl.load(sums + NUM_SPLITS + split, mask=split < num_splits, other=0.0)
    best = tl.max(largest, axis=0)
    total = tl.sum(weights * tl.exp2(largest - best), axis=0)
    dim = tl.arange(0, DIM_PADDED)
    attended = tl.zeros([DIM_PADDED], tl.float32)
    for begin in range(0, num_splits, CHUNK):
        part = begin + tl.arange(0, CHUNK)
        exists = part < num_splits
        shrink = tl.exp2(tl.load(sums + part, mask=exists, other=NO_SCORE) - best)
        at = partial + (cell * NUM_SPLITS + part)[:, None] * HEAD_DIM + dim[None, :]
        parts = tl.load(at, mask=exists[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        attended += tl.sum(parts * shrink[:, None], axis=0)
    result = (attended / total).to(out.dtype.element_ty)
    token = (start + index).to(tl.int64)
    tl.store(out + token * out_stride + head * HEAD_DIM + dim, result, mask=dim < HEAD_DIM)
