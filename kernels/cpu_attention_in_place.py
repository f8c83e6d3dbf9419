"""Attention of a few tokens on CPUs: K and V are read once, where they lie, and each score is a dot product.

Scales of a quantised cache multiply scores and weights.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import carray

from .cpu_attention_softmax import TILE, cap_scores, hide_scores, soften
from .cpu_attention_tiles import find
from .cpu_numba import helper, pointer
from .cpu_vectors import LANES, add_product, dot_rows, prefetch_rows

_f32 = np.float32


@helper
def in_place(batch, rows, buffers, group, head_dim, kind):
    size_of_row, width = 4 * head_dim if kind == "float32" else head_dim, np.int64(head_dim)
    for start in range(rows.first_key, rows.end_key, TILE):
        end = min(start + TILE, rows.end_key)
        if batch.k_scales_at != 0:
            _gather_scales(batch, rows, buffers, start, end)
        for token in range(rows.num_tokens):
            position = rows.position + token
            low, high = max(position + 1 - batch.window, start), min(position + 1, end)
            if low >= high:
                continue
            query_at = buffers.query + 4 * token * group * head_dim
            key = start
            while key < end:
                at, length = find(batch, rows, key, end)
                values_at = batch.v_at + at * size_of_row
                at, scores_at = batch.k_at + at * size_of_row, buffers.scores + 4 * (key - start)
                for i in range(0, length - 3, 4):
                    prefetch_rows(values_at + i * size_of_row, 4, head_dim, kind)
                    dot_rows(query_at, at + i * size_of_row, scores_at + 4 * i, group, 4, head_dim, TILE, kind)
                for i in range(length - length % 4, length):
                    dot_rows(query_at, at + i * size_of_row, scores_at + 4 * i, group, 1, head_dim, TILE, kind)
                key += length
            _soften(batch, buffers, token * group, group, low - start, high - start, width)
            attended_at = buffers.attended + 4 * token * group * head_dim
            key = start
            while key < end:
                at, length = find(batch, rows, key, end)
                at = batch.v_at + at * size_of_row
                if key + TILE < rows.end_key:
                    next_at, next_length = find(batch, rows, key + TILE, rows.end_key)
                    for i in range(0, next_length, 4):
                        prefetch_rows(batch.k_at + (next_at + i) * size_of_row, 4, head_dim, kind)
                weights_at = buffers.scores + 4 * (key - start)
                add_product(weights_at, TILE, at, length, attended_at, group, head_dim, kind)
                key += length


@helper
def _soften(batch, buffers, first, num_rows, low, high, head_dim):
    """Turns the scores of a token's rows, those from low to high, into weights."""
    if batch.k_scales_at != 0:
        _scale(buffers.scores, num_rows, buffers.k_scale)
    if batch.soft_cap > 0:
        cap_scores(buffers.scores, num_rows, _f32(batch.soft_cap))
    for row in range(num_rows):
        hide_scores(buffers.scores + 4 * TILE * row, low, high)
    bound_at, total_at = buffers.bound + 4 * first, buffers.total + 4 * first * LANES
    attended_at = buffers.attended + 4 * first * head_dim
    soften(buffers.scores, num_rows, bound_at, total_at, attended_at, head_dim)
    if batch.k_scales_at != 0:
        _scale(buffers.scores, num_rows, buffers.v_scale)


@helper
def _scale(scores_at, num_rows, scales_at):
    scores = carray(pointer(scores_at), (num_rows, TILE), _f32)
    scales = carray(pointer(scales_at), (TILE,), _f32)
    for row in range(num_rows):
        for j in range(TILE):
            scores[row, j] *= scales[j]


@helper
def _gather_scales(batch, rows, buffers, start, end):
    key_scale = carray(pointer(buffers.k_scale), (TILE,), _f32)
    value_scale = carray(pointer(buffers.v_scale), (TILE,), _f32)
    key = start
    while key < end:
        at, length = find(batch, rows, key, end)
        of_keys = carray(pointer(batch.k_scales_at + 4 * at), (length,), _f32)
        of_values = carray(pointer(batch.v_scales_at + 4 * at), (length,), _f32)
        for i in range(length):
            key_scale[key - start + i] = of_keys[i]
            value_scale[key - start + i] = of_values[i]
        key += length
