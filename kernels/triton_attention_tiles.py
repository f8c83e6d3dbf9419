"""The arithmetic of paged attention in Triton: tiles of keys and values, and how keys are divided into splits."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

NO_SCORE = tl.constexpr(-1e30)
"""The largest score of a row that has seen no key: finite, so that the difference of two is never NaN."""

VALUE_GAIN = tl.constexpr(64.0)
"""Keeps weight × scale of a quantised value out of float16's subnormals; divided out again at the end."""

MIN_SPLIT_TILES = tl.constexpr(2)
"""A split of a sequence has at least as many tiles: a pipeline has two on their way at once."""


@triton.jit
def first_tile(first_position, sliding_window, TILE: tl.constexpr):
    """Where the tile begins that holds the oldest key a query at ``first_position`` sees: a multiple of ``TILE``."""
    return 0 if sliding_window is None else tl.maximum(first_position + 1 - sliding_window, 0) // TILE * TILE


@triton.jit
def split_keys(num_keys, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Keys of each split: whole tiles. A short sequence has fewer splits than ``NUM_SPLITS``."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, TILE), NUM_SPLITS), MIN_SPLIT_TILES) * TILE


@triton.jit
def load_tile(at, dim, exists, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Rows of K or V. Unwritten memory may hold NaN, and 0 × NaN is NaN: what does not exist is never loaded."""
    if HEAD_DIM < DIM_PADDED:
        inside = (dim < HEAD_DIM)[None, :]
        if MASKED:
            inside = inside & exists[:, None]
        tile = tl.load(at, mask=inside, other=0.0)
    elif MASKED:
        tile = tl.load(at, mask=exists[:, None], other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def load_scales(at, exists, MASKED: tl.constexpr):
    return tl.load(at, mask=exists, other=0.0) if MASKED else tl.load(at)


@triton.jit
def widen(tile, dtype: tl.constexpr):
    """What was stored, in the dtype of the product; exactly. Bytes are fp8 e4m3, where a target lacks the type.

    e4m3's bits, moved into float16's places, stand for 2^-8 of its value (biases 7 and 15), subnormal or not.
    """
    if tile.dtype == tl.uint8:
        bits = tile.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        tile = half.to(tl.float16, bitcast=True) * 256.0
    return tile.to(dtype)


@triton.jit
def attend_tiles(
    attended,
    largest,
    total,
    query,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    table,
    positions,
    begin,
    end,
    oldest_key,
    sliding_window,
    cap_scale,
    score_scale,
    cache_block_stride,
    scale_block_stride,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Goes on with the online softmax over the keys begin … end - 1.

    query ``[ROWS, DIM_PADDED]``, its rows at ``positions``; the caches begin at the KV head. ``attended`` is the
    weighted sum of values, not yet divided; ``largest`` each row's largest score, in powers of two; ``total`` its sum
    of weights. Without ``MASKED`` every key must be visible to every row.
    """
    dim = tl.arange(0, DIM_PADDED)
    for start in range(begin, end, TILE):
        key_at = start + tl.arange(0, TILE)
        exists = (key_at >= oldest_key) & (key_at < end)
        if MASKED:
            block = tl.load(table + key_at // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        else:
            block = tl.load(table + key_at // BLOCK_SIZE).to(tl.int64)
        slot = block * cache_block_stride + (key_at % BLOCK_SIZE) * HEAD_DIM
        at = slot[:, None] + dim[None, :]
        key = widen(load_tile(key_cache + at, dim, exists, HEAD_DIM, DIM_PADDED, MASKED), query.dtype)
        value = widen(load_tile(value_cache + at, dim, exists, HEAD_DIM, DIM_PADDED, MASKED), query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if key_scales is not None:
            scale_at = block * scale_block_stride + key_at % BLOCK_SIZE
            score *= load_scales(key_scales + scale_at, exists, MASKED)[None, :]
        if cap_scale is not None:
            # tanh, of a power of two that may overflow to infinity and then gives 1.
            score = 1.0 - 2.0 / (tl.exp2(score * cap_scale) + 1.0)
        if MASKED:
            visible = exists[None, :] & (key_at[None, :] <= positions[:, None])
            if sliding_window is not None:
                visible = visible & (key_at[None, :] > positions[:, None] - sliding_window)
            score = tl.where(visible, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, axis=1) * score_scale)
        weight = tl.exp2(tl.fma(score, score_scale, -new_largest[:, None]))
        shrink = tl.exp2(largest - new_largest)
        largest = new_largest
        total = total * shrink + tl.sum(weight, axis=1)
        attended = attended * shrink[:, None]
        if value_scales is not None:
            weight *= load_scales(value_scales + scale_at, exists, MASKED)[None, :] * VALUE_GAIN
        attended = tl.dot(weight.to(query.dtype), value, acc=attended, input_precision="ieee")
    return attended, largest, total
