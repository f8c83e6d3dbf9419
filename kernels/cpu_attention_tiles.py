"""What the arithmetic of attention on CPUs works on: a call, a task of it, and a thread's buffers.

Rows are (token, query head of the group) pairs, token by token, so that all query heads of a KV head share each load.
There are two ways to make a tile's scores: cpu_attention_in_place.py for a few tokens, cpu_attention_packed.py for
many; cpu_attention_softmax.py makes weights of them.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from .cpu_attention_softmax import NO_BOUND, TILE, sum_of_lanes
from .cpu_numba import helper, pointer
from .cpu_vectors import LANES, ROWS

_f32 = np.float32


class Batch(NamedTuple):
    """A call's addresses and sizes, all integers but the last three; the first five change from call to call."""

    tables_at: Any
    lens_at: Any
    starts_at: Any
    num_seqs: Any
    max_blocks: Any
    q_at: Any
    q_stride: Any
    k_at: Any
    v_at: Any
    k_scales_at: Any
    """0: the cache is not quantised."""
    v_scales_at: Any
    out_at: Any
    num_kv_heads: Any
    block_size: Any
    window: Any
    """``NO_WINDOW``: none."""
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
    bound: Any
    """``[rows]``: no score so far is larger; see cpu_attention_softmax.py."""
    total: Any
    """``[rows, LANES]``: the weights' sums so far, which add up to what divides."""
    scores: Any
    """``[rows of a step, TILE]``"""
    k_scale: Any
    """``[TILE]``"""
    v_scale: Any
    tile: Any
    """``[TILE, D]``"""
    transposed: Any
    """``[D, TILE]``"""


NO_WINDOW = 1 << 30
"""Positions less this still fit into the int32 that vectors of positions are made of."""

LINE = 16
"""float32 in a cache line: vectors that lie across two cost twice."""


def buffer_floats(num_rows: int, group: int, head_dim: int) -> int:
    """Size of a thread's buffers, by most rows of a task; see ``place_buffers``."""
    rows = -(-num_rows // ROWS) * ROWS
    return round_up(rows * (2 * head_dim + 1 + LANES) + TILE * (max(group, ROWS) + 2 + 2 * head_dim), LINE)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@helper
def place_buffers(at, num_rows, group, head_dim):
    rows = -(-num_rows // ROWS) * ROWS
    attended = at + 4 * rows * head_dim
    tile = attended + 4 * rows * head_dim
    transposed = tile + 4 * TILE * head_dim
    scores = transposed + 4 * TILE * head_dim
    k_scale = scores + 4 * TILE * max(group, ROWS)
    v_scale = k_scale + 4 * TILE
    total = v_scale + 4 * TILE
    bound = total + 4 * rows * LANES
    return Buffers(at, attended, bound, total, scores, k_scale, v_scale, tile, transposed)


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
    carray(pointer(buffers.bound), (room,), _f32)[:] = NO_BOUND
    carray(pointer(buffers.total), (room * LANES,), _f32)[:] = _f32(0)


@helper
def finish_rows(batch, rows, buffers, group, head_dim):
    attended = carray(pointer(buffers.attended), (rows.num_tokens * group, head_dim), _f32)
    for token in range(rows.num_tokens):
        row = (rows.first_token + token) * batch.num_kv_heads + rows.head
        out = carray(pointer(batch.out_at + 4 * row * group * head_dim), (group, head_dim), _f32)
        for g in range(group):
            factor = _f32(batch.unit) / sum_of_lanes(buffers.total + 4 * LANES * (token * group + g))
            for d in range(head_dim):
                out[g, d] = attended[token * group + g, d] * factor


@helper
def find(batch, rows, key, end):
    """Where a key lies, as an index of rows of the cache, and how many follow it there, up to ``end``."""
    table = carray(pointer(rows.table_at), (batch.max_blocks,), np.int32)
    block, offset = np.int64(table[key // batch.block_size]), key % batch.block_size
    at = (block * batch.num_kv_heads + rows.head) * batch.block_size + offset
    return at, min(batch.block_size - offset, end - key)
