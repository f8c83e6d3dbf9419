"""Attention of many tokens on CPUs: a tile's K is transposed and its V made contiguous, in a buffer of this thread.

Both products are a matrix product's inner loops then, whose operands stay in the first- and second-level cache. A
quantised tile is widened, and multiplied by its scales, while it is copied: once for all rows of the task. Meanwhile
the next tile is asked for, since the processor's own prefetching ends with a page, which is about a block of the cache.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import carray

from .cpu_attention_softmax import TILE, cap_scores, hide_scores, multiply, soften
from .cpu_attention_tiles import find
from .cpu_numba import helper, pointer
from .cpu_vectors import LANES, ROWS, add_product, prefetch_rows, set_product, transpose, widen_row

HALF_TILE = TILE // 2
_f32 = np.float32


@helper
def packed(batch, rows, buffers, group, head_dim, kind):
    size_of_row = 4 * head_dim if kind == "float32" else head_dim
    for start in range(rows.first_key, rows.end_key, TILE):
        end = min(start + TILE, rows.end_key)
        for key in range(start, end, LANES):
            at, length = find(batch, rows, key, end)
            source_at = batch.k_at + size_of_row * at
            if kind != "float32" or length < LANES:  # else straight out of the cache
                source_at, key_end = buffers.tile, min(key + LANES, end)
                _gather(batch, rows, batch.k_at, batch.k_scales_at, key, key_end, source_at, head_dim, kind)
            transpose(source_at, buffers.transposed + 4 * (key - start), LANES, head_dim, TILE)
        _gather(batch, rows, batch.v_at, batch.v_scales_at, start, end, buffers.tile, head_dim, kind)
        for first in range(0, rows.num_tokens * group, ROWS):
            key = end + first // ROWS
            if key < min(end + TILE, rows.end_key):  # of the next tile
                at, _ = find(batch, rows, key, rows.end_key)
                prefetch_rows(batch.k_at + size_of_row * at, 1, head_dim, kind)
                prefetch_rows(batch.v_at + size_of_row * at, 1, head_dim, kind)
            _step(batch, rows, buffers, first, start, end, group, head_dim)


@helper
def _gather(batch, rows, cache_at, scales_at, start, end, tile_at, head_dim, kind):
    size_of_row = 4 * head_dim if kind == "float32" else head_dim
    key = start
    while key < end:
        at, length = find(batch, rows, key, end)
        for i in range(length):
            target_at = tile_at + 4 * head_dim * (key - start + i)
            widen_row(cache_at + (at + i) * size_of_row, target_at, head_dim, kind)
            if kind != "float32":
                scale = carray(pointer(scales_at + 4 * (at + i)), (1,), _f32)[0]
                multiply(target_at, np.int64(head_dim), scale)
        key += length


@helper
def _step(batch, rows, buffers, first, start, end, group, head_dim):
    """``ROWS`` rows against a packed tile; without keys that none of them sees, where those are easily left out."""
    first_position = rows.position + first // group
    last_position = rows.position + min((first + ROWS - 1) // group, rows.num_tokens - 1)
    visible = min(end, last_position + 1) - start
    if visible <= 0 or end <= first_position + 1 - batch.window:
        return
    query_at, scores_at = buffers.query + 4 * first * head_dim, buffers.scores
    if visible > HALF_TILE:
        set_product(query_at, head_dim, buffers.transposed, head_dim, scores_at, ROWS, TILE, TILE)
    else:
        set_product(query_at, head_dim, buffers.transposed, head_dim, scores_at, ROWS, HALF_TILE, TILE)
    if batch.soft_cap > 0:
        cap_scores(scores_at, ROWS, _f32(batch.soft_cap))
    if start + TILE > min(end, first_position + 1) or start < last_position + 1 - batch.window:
        for row in range(ROWS):
            position = rows.position + (first + row) // group
            low, high = position + 1 - batch.window - start, min(position + 1 - start, visible)
            hide_scores(scores_at + 4 * TILE * row, low, high)
    attended_at = buffers.attended + 4 * first * head_dim
    bound_at, total_at = buffers.bound + 4 * first, buffers.total + 4 * first * LANES
    soften(scores_at, ROWS, bound_at, total_at, attended_at, np.int64(head_dim))
    add_product(scores_at, TILE, buffers.tile, visible, attended_at, ROWS, head_dim, "float32")
