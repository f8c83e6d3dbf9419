"""Matrix products in Triton whose operands have one type: int8 and fp8 with scales, and plain ones."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_cache import LARGEST, SMALLEST_SCALE
from .quantized import DIGIT_RATIO
from .triton_device import Device
from .triton_linear_tiles import TILES_IN_GROUP, Grid, Tile, add_splits, find_tile

TILES_OF_BYTES = (
    Tile(rows=128, columns=128, inner=128, num_warps=8, num_stages=3),
    Tile(rows=64, columns=128, inner=128, num_warps=4, num_stages=4),
    Tile(rows=64, columns=64, inner=128, num_warps=4, num_stages=4),
    Tile(rows=32, columns=64, inner=256, num_warps=4, num_stages=4),
    Tile(rows=16, columns=64, inner=256, num_warps=4, num_stages=4),
)
"""For int8 and fp8, large ones first."""

FIXED_TILES = {
    1: Tile(rows=64, columns=64, inner=128, num_warps=4, num_stages=4),
    2: Tile(rows=64, columns=64, inner=64, num_warps=4, num_stages=4),
    4: Tile(rows=64, columns=64, inner=32, num_warps=4, num_stages=3),
}
"""Of batch-invariant products, by the bytes of an element."""


@triton.jit
def round_to_multiple(x, UNIT: tl.constexpr):
    """To the nearest, ties to even, of the multiples of a power of two: floats of this size have no finer steps."""
    return (x + 12582912.0 * UNIT) - 12582912.0 * UNIT


@triton.jit
def round_to_fp8(x):
    """To the nearest number of e4m3, ties to even. Triton's interpreter loses a carry when it converts others."""
    bits = x.to(tl.int32, bitcast=True)
    # Of the 23 bits of a mantissa 3 stay.
    normal = (bits + (0x7FFFF + ((bits >> 20) & 1))) & -0x100000
    return tl.where(tl.abs(x) < 2**-6, round_to_multiple(x, 2**-9), normal.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["num_rows"])
def quantize_rows_kernel(
    x,
    values,
    scales,
    num_rows,
    width,
    x_stride,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows). With a ``RATIO`` second digits follow after the rows of all first ones."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    numbers = tl.load(x + row * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
    # "/" is not rounded correctly on GPUs; the reference's is.
    # The largest by its bits, among which NaN's are the largest: as a float it would be passed over.
    largest = tl.max(tl.abs(numbers).to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, LARGEST)
    scale = tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
    scaled = tl.div_rn(numbers, scale)
    scaled = round_to_multiple(scaled, 1.0) if values.dtype.element_ty == tl.int8 else round_to_fp8(scaled)
    tl.store(values + row * width + at, scaled.to(values.dtype.element_ty), mask=at < width)
    tl.store(scales + row, scale)
    if RATIO > 0:
        unit = tl.div_rn(scale, RATIO)
        # Read again: a wide row in registers twice would not fit.
        numbers = tl.load(x + row * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
        scaled = round_to_multiple(tl.div_rn(numbers, scale), 1.0)
        rest = round_to_multiple(tl.div_rn(numbers - scaled * scale, unit), 1.0)
        tl.store(values + (num_rows + row) * width + at, rest.to(values.dtype.element_ty), mask=at < width)
        tl.store(scales + num_rows + row, unit)


@triton.jit(do_not_specialize=["num_rows", "steps_per_split"])
def gemm_kernel(
    x,
    weight,
    row_scales,
    column_scales,
    bias,
    out,
    scratch,
    counters,
    num_rows,
    num_out,
    num_in,
    x_stride,
    weight_stride,
    steps_per_split,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """out = x · weightᵀ, in int32 or float32, × scales (or None) + bias (or None). Grid (tiles, splits)."""
    program = tl.program_id(0)
    row_tile, column_tile = find_tile(program, tl.cdiv(num_rows, ROWS), tl.cdiv(num_out, COLUMNS), GROUP)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    row_exists = row < num_rows
    column_exists = column < num_out
    channel = tl.arange(0, INNER)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + channel[None, :]
    weight_at = weight + column.to(tl.int64)[:, None] * weight_stride + channel[None, :]
    IS_INT8: tl.constexpr = weight.dtype.element_ty == tl.int8
    # Hopper's fp8 products keep 14 bits of a sum: each step's is added in float32.
    IMPRECISE: tl.constexpr = INNER if weight.dtype.element_ty == tl.float8e4nv else None
    total = tl.zeros([ROWS, COLUMNS], tl.int32 if IS_INT8 else tl.float32)
    first = tl.program_id(1) * steps_per_split * INNER
    end = tl.minimum(num_in, first + steps_per_split * INNER)
    for start in range(first, end, INNER):
        exists = start + channel < end
        x_tile = tl.load(x_at + start, mask=row_exists[:, None] & exists[None, :], other=0.0)
        weight_tile = tl.load(weight_at + start, mask=column_exists[:, None] & exists[None, :], other=0.0)
        if UPCAST:
            x_tile = x_tile.to(tl.float32)
            weight_tile = weight_tile.to(tl.float32)
        total = tl.dot(
            x_tile,
            tl.trans(weight_tile),
            total,
            input_precision="ieee",
            max_num_imprecise_acc=IMPRECISE,
            out_dtype=total.dtype,
        )
    inside = row_exists[:, None] & column_exists[None, :]
    if scratch is not None:
        total, is_last = add_splits(total, inside, scratch, counters, program)
        inside = inside & is_last
    result = total.to(tl.float32)
    if row_scales is not None:
        result *= tl.load(row_scales + row, mask=row_exists, other=0.0)[:, None]
        result *= tl.load(column_scales + column, mask=column_exists, other=0.0)[None, :]
    if bias is not None:
        result += tl.load(bias + column, mask=column_exists, other=0.0).to(tl.float32)[None, :]
    out_at = out + row.to(tl.int64)[:, None] * num_out + column[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=inside)


def quantize_rows(x: Tensor, dtype: torch.dtype, num_digits: int = 1) -> tuple[Tensor, Tensor]:
    """As ``kv_cache.quantize_tokens``, of ``x [T, in]``; with two digits the second ones of all rows follow (int8)."""
    values = torch.empty((num_digits * x.shape[0], x.shape[1]), dtype=dtype, device=x.device)
    scales = torch.empty(values.shape[0], dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    if x.shape[0] == 0:
        return values, scales
    quantize_rows_kernel[(x.shape[0],)](
        x,
        values,
        scales,
        x.shape[0],
        x.shape[1],
        x.stride(0),
        LARGEST=LARGEST[dtype],
        SMALLEST_SCALE=SMALLEST_SCALE,
        RATIO=DIGIT_RATIO if num_digits == 2 else 0.0,
        BLOCK=block,
        num_warps=min(16, max(4, block // 1024)),
    )
    return values, scales


def gemm(
    x: Tensor,
    weight: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    grid: Grid,
    counters: Tensor | None,
    device: Device,
) -> Tensor:
    """``[T, out]`` of ``dtype``: ``x [T, in]`` · ``weight[out, in]``ᵀ, of one type, × scales ``[T]`` and ``[out]``."""
    (num_rows, num_in), num_out, tile = x.shape, weight.shape[0], grid.tile
    out = torch.empty((num_rows, num_out), dtype=dtype, device=x.device)
    sums = torch.int32 if weight.dtype == torch.int8 else torch.float32
    if num_rows == 0:
        return out
    gemm_kernel[(grid.num_tiles, grid.num_splits)](
        x,
        weight,
        *(scales or (None, None)),
        bias,
        out,
        grid.scratch(sums, x.device),
        counters,
        num_rows,
        num_out,
        num_in,
        x.stride(0),
        weight.stride(0),
        grid.steps_per_split,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        INNER=tile.inner,
        GROUP=TILES_IN_GROUP,
        # Triton's interpreter, in which the tests run, keeps bfloat16 as integers and would multiply those.
        UPCAST=triton.knobs.runtime.interpret and weight.dtype == torch.bfloat16,
        **tile.options(device),
    )
    return out
