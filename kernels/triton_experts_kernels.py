"""A mixture of experts in Triton: the choice of experts, the two grouped products, and the sum of their results.

A pair's number is token × k + choice. Pairs are ordered by expert; ``starts [E + 1]`` says where each expert's begin.
A *tile* is up to ROWS pairs of one expert. How many tiles there are is known on the device alone; the grid has the
most there can be, and each program finds its own, or that it has none:

    pairs of experts 0 1 2 3      20   0   3  33        ROWS 16
    their tiles                   0 1      2  3 4 5     programs from 6 on leave

Neither asks the device for anything, so that a step is captured as a graph.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from .triton_elementwise import SILU, activate

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""See ``reference_experts.LOWEST``."""


@triton.jit
def route_kernel(
    logits,
    experts,
    weights,
    logits_stride,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHOSEN_PADDED: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    """One program for one token: its experts, the likeliest first, of equals the first, and their weights."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_PADDED)
    choice = tl.arange(0, CHOSEN_PADDED)
    inside = expert < NUM_EXPERTS
    given = tl.load(logits + token * logits_stride + expert, mask=inside, other=0.0).to(tl.float32)
    # Neither NaN nor -inf is above it. What is no expert, or was chosen, is below.
    left = tl.where(inside, tl.where(given > LOWEST, given, LOWEST), -float("inf"))
    largest = tl.max(left, axis=0)
    total = tl.sum(tl.exp(left - largest), axis=0)
    chosen = tl.zeros([CHOSEN_PADDED], tl.int32)
    weight = tl.zeros([CHOSEN_PADDED], tl.float32)
    for number in range(NUM_CHOSEN):
        value = tl.max(left, axis=0)
        best = tl.min(tl.where(left == value, expert, EXPERTS_PADDED), axis=0)
        chosen = tl.where(choice == number, best, chosen)
        weight = tl.where(choice == number, tl.exp(value - largest), weight)
        left = tl.where(expert == best, -float("inf"), left)
    if RENORMALISE:
        total = tl.sum(weight, axis=0)
    at = token * NUM_CHOSEN + choice
    tl.store(experts + at, chosen, mask=choice < NUM_CHOSEN)
    tl.store(weights + at, weight / total, mask=choice < NUM_CHOSEN)


@triton.jit
def find_rows(starts, tile, NUM_EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Of a tile: its expert, its first pair and the one after its expert's last. NUM_EXPERTS where there is no tile."""
    expert = tl.arange(0, EXPERTS_PADDED)
    inside = expert < NUM_EXPERTS
    first = tl.load(starts + expert, mask=inside, other=0)
    count = tl.load(starts + 1 + expert, mask=inside, other=0) - first
    tiles = tl.cdiv(count, ROWS)
    after = tl.cumsum(tiles, axis=0)
    own = tl.sum(((after <= tile) & inside).to(tl.int32), axis=0)
    is_own = expert == own
    begin = tl.sum(tl.where(is_own, first + (tile - (after - tiles)) * ROWS, 0), axis=0)
    end = tl.sum(tl.where(is_own, first + count, 0), axis=0)
    return own, begin, end


@triton.jit
def multiply(x, weight, total, UPCAST: tl.constexpr):
    """total + x · weightᵀ"""
    if UPCAST:
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
    return tl.dot(x, tl.trans(weight), total, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def multiply_tile(
    x_rows,
    weight_rows,
    row_exists,
    column_exists,
    num_in,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """float32 ``[ROWS, COLUMNS]`` of rows of x and of a weight, given by where they begin."""
    channel = tl.arange(0, INNER)
    x_at = x_rows[:, None] + channel[None, :]
    weight_at = weight_rows[:, None] + channel[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, num_in, INNER):
        exists = start + channel < num_in
        x_tile = tl.load(x_at + start, mask=row_exists[:, None] & exists[None, :], other=0.0)
        weight_tile = tl.load(weight_at + start, mask=column_exists[:, None] & exists[None, :], other=0.0)
        total = multiply(x_tile, weight_tile, total, UPCAST)
    return total


@triton.jit
def gate_up_kernel(
    x,
    weight,
    order,
    starts,
    out,
    num_out,
    num_in,
    x_stride,
    NUM_CHOSEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``out [pairs in order, I]`` = silu(gate) × up of each pair's token. Grid (tiles, column tiles)."""
    expert, begin, end = find_rows(starts, tl.program_id(0), NUM_EXPERTS, EXPERTS_PADDED, ROWS)
    if expert < NUM_EXPERTS:
        row = begin + tl.arange(0, ROWS)
        row_exists = row < end
        token = tl.load(order + row, mask=row_exists, other=0) // NUM_CHOSEN
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        column_exists = column < num_out
        channel = tl.arange(0, INNER)
        x_at = x + token.to(tl.int64)[:, None] * x_stride + channel[None, :]
        first = expert.to(tl.int64) * 2 * num_out
        gate_at = weight + (first + column)[:, None] * num_in + channel[None, :]
        up_at = weight + (first + num_out + column)[:, None] * num_in + channel[None, :]
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, num_in, INNER):
            exists = start + channel < num_in
            inside = column_exists[:, None] & exists[None, :]
            x_tile = tl.load(x_at + start, mask=row_exists[:, None] & exists[None, :], other=0.0)
            gate = multiply(x_tile, tl.load(gate_at + start, mask=inside, other=0.0), gate, UPCAST)
            up = multiply(x_tile, tl.load(up_at + start, mask=inside, other=0.0), up, UPCAST)
        result = activate(gate, SILU) * up
        out_at = out + row.to(tl.int64)[:, None] * num_out + column[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=row_exists[:, None] & column_exists[None, :])


@triton.jit
def down_kernel(
    x,
    weight,
    order,
    starts,
    weights,
    out,
    num_out,
    num_in,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``out [pairs by number, hidden]`` of ``x [pairs in order, I]``, times the pairs' weights. Grid as above."""
    expert, begin, end = find_rows(starts, tl.program_id(0), NUM_EXPERTS, EXPERTS_PADDED, ROWS)
    if expert < NUM_EXPERTS:
        row = begin + tl.arange(0, ROWS)
        row_exists = row < end
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        column_exists = column < num_out
        x_rows = x + row.to(tl.int64) * num_in
        weight_rows = weight + (expert.to(tl.int64) * num_out + column) * num_in
        total = multiply_tile(x_rows, weight_rows, row_exists, column_exists, num_in, ROWS, COLUMNS, INNER, UPCAST)
        pair = tl.load(order + row, mask=row_exists, other=0)
        total *= tl.load(weights + pair, mask=row_exists, other=0.0)[:, None]
        out_at = out + pair.to(tl.int64)[:, None] * num_out + column[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=row_exists[:, None] & column_exists[None, :])


@triton.jit
def combine_kernel(parts, out, width, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """``out [T, hidden]``: the sum of a token's ``parts [T × k, hidden]``, in their order. Grid (tokens, blocks)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(NUM_CHOSEN):
        at = parts + (token * NUM_CHOSEN + choice) * width + column
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)
