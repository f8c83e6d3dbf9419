"""The arithmetic of attention on CPUs: one task's query rows against its keys, tile by tile, with an online softmax.

Milakov and Gimelshein 2018; Dao 2022. Rows are (token, query head of the group) pairs, token by token, so that all
query heads of a KV head share each load. Two ways to make the scores of a tile:

* ``in_place``, for a few tokens: K and V are read once, where they lie, and each score is a dot product.
* ``packed``, for many: the tile's K is transposed and its V made contiguous, in a buffer of this thread, and both
  products are a matrix product's inner loops, whose operands stay in the first- and second-level cache.

A quantised tile is widened on the way to the registers; its scales multiply scores and weights.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from .cpu_numba import fast_exp, helper, pointer
from .cpu_vectors import ROWS, add_product, dot_rows, largest_of, prefetch_rows, transpose, widen_row

TILE = 64
"""Keys per round of the online softmax: a K tile of 64 × 64 float32 is 16 KiB, half of a first-level cache."""

_f32 = np.float32
_LOWEST = _f32(-1e30)


class Batch(NamedTuple):
    """A call's addresses and sizes, all integers but the last three."""

    q_at: Any
    q_stride: Any
    k_at: Any
    v_at: Any
    k_scales_at: Any
    """0: the cache is not quantised."""
    v_scales_at: Any
    tables_at: Any
    lens_at: Any
    starts_at: Any
    out_at: Any
    num_seqs: Any
    num_kv_heads: Any
    block_size: Any
    max_blocks: Any
    window: Any
    """The longest sequence's length or more: none."""
    scale: Any
    """Of scores, ``unit`` within."""
    unit: Any
    """What a stored number that was read is multiplied by."""
    soft_cap: Any
    """0: none."""


class Rows(NamedTuple):
    """One task: the query rows of some tokens of one sequence and KV head, and the keys for them."""

    table_at: Any
    head: Any
    first_token: Any
    """Row of the query tensor."""
    num_tokens: Any
    position: Any
    """The first token's."""
    first_key: Any
    end_key: Any


class Buffers(NamedTuple):
    """Addresses of float32 buffers of one thread. Those of rows have room for a multiple of ``ROWS``."""

    query: Any
    """``[rows, D]``, scaled."""
    attended: Any
    """``[rows, D]``"""
    largest: Any
    """``[rows]``: the largest score so far."""
    total: Any
    """``[rows]``: the weights' sum so far."""
    scores: Any
    """``[rows of a step, TILE]``"""
    k_scale: Any
    """``[TILE]``"""
    v_scale: Any
    tile: Any
    """``[TILE, D]``"""
    transposed: Any
    """``[D, TILE]``"""


LINE = 16
"""float32 in a cache line: vectors that lie across two cost twice."""


def buffer_floats(num_rows: int, group: int, head_dim: int) -> int:
    """Size of a thread's buffers, by most rows of a task; see ``place_buffers``."""
    rows = -(-num_rows // ROWS) * ROWS
    return round_up(2 * rows * (head_dim + 1) + TILE * (max(group, ROWS) + 2 + 2 * head_dim), LINE)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class State(NamedTuple):
    """Addresses of one row's sums, and of its tile's scales."""

    attended: Any
    largest: Any
    total: Any
    k_scale: Any
    v_scale: Any


@helper
def _state(buffers, row, head_dim):
    return State(
        buffers.attended + 4 * row * head_dim,
        buffers.largest + 4 * row,
        buffers.total + 4 * row,
        buffers.k_scale,
        buffers.v_scale,
    )


@helper
def place_buffers(at, num_rows, group, head_dim):
    rows = -(-num_rows // ROWS) * ROWS
    attended = at + 4 * rows * head_dim
    tile = attended + 4 * rows * head_dim
    transposed = tile + 4 * TILE * head_dim
    scores = transposed + 4 * TILE * head_dim
    k_scale = scores + 4 * TILE * max(group, ROWS)
    v_scale = k_scale + 4 * TILE
    largest = v_scale + 4 * TILE
    return Buffers(at, attended, largest, largest + 4 * rows, scores, k_scale, v_scale, tile, transposed)


@helper
def start_rows(batch, rows, buffers, group, head_dim):
    """Scales the query into its buffer, and empties sums; a last, incomplete step of rows is filled up with zeros."""
    scale = _f32(batch.scale)
    num_rows = rows.num_tokens * group
    room = -(-num_rows // ROWS) * ROWS
    query = carray(pointer(buffers.query), (room * head_dim,), _f32)
    for token in range(rows.num_tokens):
        at = batch.q_at + 4 * ((rows.first_token + token) * batch.q_stride + rows.head * group * head_dim)
        source = carray(pointer(at), (group * head_dim,), _f32)
        for i in range(group * head_dim):
            query[token * group * head_dim + i] = source[i] * scale
    query[num_rows * head_dim :] = _f32(0)
    carray(pointer(buffers.attended), (room * head_dim,), _f32)[:] = _f32(0)
    carray(pointer(buffers.largest), (room,), _f32)[:] = _LOWEST
    carray(pointer(buffers.total), (room,), _f32)[:] = _f32(0)


@helper
def finish_rows(batch, rows, buffers, group, head_dim):
    attended = carray(pointer(buffers.attended), (rows.num_tokens * group, head_dim), _f32)
    total = carray(pointer(buffers.total), (rows.num_tokens * group,), _f32)
    for token in range(rows.num_tokens):
        row = (rows.first_token + token) * batch.num_kv_heads + rows.head
        out = carray(pointer(batch.out_at + 4 * row * group * head_dim), (group, head_dim), _f32)
        for g in range(group):
            factor = _f32(batch.unit) / total[token * group + g]
            for d in range(head_dim):
                out[g, d] = attended[token * group + g, d] * factor


@helper
def _find(batch, rows, key, end):
    """Where a key lies, as an index of rows of the cache, and how many follow it there, up to ``end``."""
    table = carray(pointer(rows.table_at), (batch.max_blocks,), np.int32)
    block, offset = np.int64(table[key // batch.block_size]), key % batch.block_size
    at = (block * batch.num_kv_heads + rows.head) * batch.block_size + offset
    return at, min(batch.block_size - offset, end - key)


@helper
def _gather_scales(batch, rows, buffers, start, end):
    key_scale = carray(pointer(buffers.k_scale), (TILE,), _f32)
    value_scale = carray(pointer(buffers.v_scale), (TILE,), _f32)
    key = start
    while key < end:
        at, length = _find(batch, rows, key, end)
        of_keys = carray(pointer(batch.k_scales_at + 4 * at), (length,), _f32)
        of_values = carray(pointer(batch.v_scales_at + 4 * at), (length,), _f32)
        for i in range(length):
            key_scale[key - start + i] = of_keys[i]
            value_scale[key - start + i] = of_values[i]
        key += length


@helper
def _soften(scores_at, state, low, high, soft_cap, quantized, head_dim):
    """Turns a row's scores of a tile, those from low to high, into weights; rescales what was summed before.

    The others become 1e-38 or less, of the largest: loops of a fixed length are what LLVM makes the best of.
    """
    scores = carray(pointer(scores_at), (TILE,), _f32)
    largest = carray(pointer(state.largest), (1,), _f32)
    total = carray(pointer(state.total), (1,), _f32)
    if quantized:
        _scale(scores, state.k_scale)
    if soft_cap > 0:
        _cap(scores, _f32(soft_cap))
    for j in range(low):
        scores[j] = _LOWEST
    for j in range(high, TILE):
        scores[j] = _LOWEST
    before = largest[0]
    new_largest = max(before, largest_of(scores_at, TILE))
    weight_sum = _f32(0)
    for j in range(TILE):
        weight = fast_exp(scores[j] - new_largest)
        scores[j] = weight
        weight_sum += weight
    if new_largest > before:
        shrink = fast_exp(before - new_largest)
        attended = carray(pointer(state.attended), (head_dim,), _f32)
        for d in range(head_dim):
            attended[d] *= shrink
        weight_sum += total[0] * shrink
        largest[0] = new_largest
        total[0] = weight_sum
    else:
        total[0] += weight_sum
    if quantized:
        _scale(scores, state.v_scale)


@helper
def _scale(scores, scales_at):
    scales = carray(pointer(scales_at), (TILE,), _f32)
    for j in range(TILE):
        scores[j] *= scales[j]


@helper
def _cap(scores, soft_cap):
    """c × tanh(s / c), tanh(x) as 1 - 2 / (exp(2x) + 1)."""
    factor = _f32(2) / soft_cap
    for j in range(TILE):
        power = fast_exp(min(scores[j] * factor, _f32(40)))
        scores[j] = soft_cap - _f32(2) * soft_cap / (power + _f32(1))


@helper
def in_place(batch, rows, buffers, group, head_dim, kind):
    size_of_row = 4 * head_dim if kind == "float32" else head_dim
    quantized, width = batch.k_scales_at != 0, np.int64(head_dim)
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
                at, length = _find(batch, rows, key, end)
                values_at = batch.v_at + at * size_of_row
                at, scores_at = batch.k_at + at * size_of_row, buffers.scores + 4 * (key - start)
                for i in range(0, length - 3, 4):
                    prefetch_rows(values_at + i * size_of_row, 4, head_dim, kind)
                    dot_rows(query_at, at + i * size_of_row, scores_at + 4 * i, group, 4, head_dim, TILE, kind)
                for i in range(length - length % 4, length):
                    dot_rows(query_at, at + i * size_of_row, scores_at + 4 * i, group, 1, head_dim, TILE, kind)
                key += length
            for g in range(group):
                state = _state(buffers, token * group + g, width)
                _soften(
                    buffers.scores + 4 * TILE * g,
                    state,
                    low - start,
                    high - start,
                    batch.soft_cap,
                    quantized,
                    width,
                )
            attended_at = buffers.attended + 4 * token * group * head_dim
            key = start
            while key < end:
                at, length = _find(batch, rows, key, end)
                at = batch.v_at + at * size_of_row
                if key + TILE < rows.end_key:
                    next_at, next_length = _find(batch, rows, key + TILE, rows.end_key)
                    for i in range(0, next_length, 4):
                        prefetch_rows(batch.k_at + (next_at + i) * size_of_row, 4, head_dim, kind)
                weights_at = buffers.scores + 4 * (key - start)
                add_product(weights_at, TILE, at, length, attended_at, group, head_dim, kind)
                key += length


@helper
def _gather(batch, rows, cache_at, start, end, tile_at, head_dim, kind):
    size_of_row = 4 * head_dim if kind == "float32" else head_dim
    key = start
    while key < end:
        at, length = _find(batch, rows, key, end)
        for i in range(length):
            target_at = tile_at + 4 * head_dim * (key - start + i)
            widen_row(cache_at + (at + i) * size_of_row, target_at, head_dim, kind)
        key += length


@helper
def packed(batch, rows, buffers, group, head_dim, kind):
    num_rows = rows.num_tokens * group
    for start in range(rows.first_key, rows.end_key, TILE):
        end = min(start + TILE, rows.end_key)
        _gather(batch, rows, batch.k_at, start, end, buffers.tile, head_dim, kind)
        transpose(buffers.tile, buffers.transposed, TILE, head_dim)
        _gather(batch, rows, batch.v_at, start, end, buffers.tile, head_dim, kind)
        if batch.k_scales_at != 0:
            _gather_scales(batch, rows, buffers, start, end)
        for first in range(0, num_rows, ROWS):
            last_position = rows.position + min(first + ROWS, num_rows) // group
            if last_position >= start:
                _step(batch, rows, buffers, first, num_rows, start, end, group, head_dim, kind)


@helper
def _step(batch, rows, buffers, first, num_rows, start, end, group, head_dim, kind):
    """``ROWS`` rows against a packed tile."""
    width = np.int64(head_dim)
    carray(pointer(buffers.scores), (ROWS * TILE,), _f32)[:] = _f32(0)
    query_at = buffers.query + 4 * first * head_dim
    add_product(query_at, head_dim, buffers.transposed, head_dim, buffers.scores, ROWS, TILE, "float32")
    for place in range(min(ROWS, num_rows - first)):
        position = rows.position + (first + place) // group
        low, high = max(position + 1 - batch.window, start), min(position + 1, end)
        scores_at = buffers.scores + 4 * TILE * place
        if low < high:
            state = _state(buffers, first + place, width)
            _soften(scores_at, state, low - start, high - start, batch.soft_cap, batch.k_scales_at != 0, width)
        else:
            carray(pointer(scores_at), (TILE,), _f32)[:] = _f32(0)
    attended_at = buffers.attended + 4 * first * head_dim
    add_product(buffers.scores, TILE, buffers.tile, end - start, attended_at, ROWS, head_dim, "float32")
