"""Matrix products in Triton by weights of four bits, which stay packed in memory.

With w = s × q + m in a group of input channels, x · w = s × (x · (16 + q)) + (m - 16 s) × sum(x). The number 16 + q is
made from the bits of q in one or two instructions (they become the first bits of a mantissa) and is exact in every
float type, so that scales meet the sums of a group, of which there are far fewer than weights, and nothing is rounded
on the way.

The kernel's own layout is int16 ``[parts, out, 32]``. A *part* is 128 input channels, the last one filled up with
zeros, and has four quarters: bits 4j to 4j + 3 of word i are channel i of quarter j. So a tile is one stretch of
memory, each quarter of it is the operand of a product without any shuffling, and scales may change from one quarter to
the next.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .quantized import Int4Weight
from .triton_device import Device
from .triton_linear_tiles import TILES_IN_GROUP, Grid, Tile, add_splits, find_tile

QUARTER = 32
PART = 4 * QUARTER

SIXTEEN = {torch.float32: (0x41800000, 23), torch.bfloat16: (0x4180, 7), torch.float16: (0x4C00, 10)}
"""The bits of 16.0, and how many of them are the mantissa's."""

TILES = (
    Tile(rows=128, columns=128, inner=PART, num_warps=8, num_stages=3),
    Tile(rows=64, columns=128, inner=PART, num_warps=8, num_stages=3),
    Tile(rows=64, columns=64, inner=PART, num_warps=4, num_stages=3),
    Tile(rows=32, columns=128, inner=PART, num_warps=4, num_stages=4),
    Tile(rows=16, columns=128, inner=PART, num_warps=4, num_stages=5),
)
"""Large ones first."""

FIXED_TILE = Tile(rows=64, columns=64, inner=PART, num_warps=4, num_stages=3)
"""Of batch-invariant products."""


def tiles_for(device: Device) -> tuple[Tile, ...]:
    """The largest one takes too much of Blackwell's memory for accumulators, and of AMD's registers."""
    return TILES[1:] if device.is_amd or device.capability >= 100 else TILES


@triton.constexpr_function
def unpack_in_ptx(index, sixteen, mantissa):
    """``unpack`` of two words in one register, which Triton takes one by one: (shifted & mask) | sixteen."""
    shift = 4 * index + 4 - mantissa
    move = f"shr.b32 t, $1, {shift};" if shift >= 0 else f"shl.b32 t, $1, {-shift};"
    mask, base = (15 << (mantissa - 4)) * 0x10001, sixteen * 0x10001
    return f"{{ .reg .b32 t; {move} lop3.b32 $0, t, {mask}, {base}, 0xEA; }}"


@triton.jit
def unpack(words, x, INDEX: tl.constexpr, SIXTEEN: tl.constexpr, MANTISSA: tl.constexpr, PTX: tl.constexpr):
    """16 + the four bits ``INDEX`` of each word, in the type that ``x`` points to."""
    SHIFT: tl.constexpr = 4 * INDEX + 4 - MANTISSA
    if PTX:
        asm: tl.constexpr = unpack_in_ptx(INDEX, SIXTEEN, MANTISSA)
        return tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=x.dtype.element_ty, is_pure=True, pack=2)
    bits = words.to(tl.int32 if MANTISSA == 23 else tl.int16)
    bits = bits >> SHIFT if SHIFT >= 0 else bits << -SHIFT
    return ((bits & (15 << (MANTISSA - 4))) | SIXTEEN).to(x.dtype.element_ty, bitcast=True)


@triton.jit
def load_scales(scales, part, num_groups, num_out, column, exists, QUARTERS_PER_GROUP: tl.constexpr, RUN: tl.constexpr):
    """Of a part's ``4 // RUN`` runs of quarters that share a scale."""
    loaded = ()
    for run in tl.static_range(4 // RUN):
        group = (4 * part + run * RUN) // QUARTERS_PER_GROUP
        values = tl.load(scales + group * num_out + column, mask=exists & (group < num_groups), other=0.0)
        loaded = loaded + (values,)  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@triton.jit(do_not_specialize=["num_rows", "steps_per_split"])
def int4_gemm_kernel(
    x,
    words,
    scales,
    minimums,
    bias,
    out,
    scratch,
    counters,
    num_rows,
    num_out,
    num_in,
    num_groups,
    x_stride,
    steps_per_split,
    QUARTERS_PER_GROUP: tl.constexpr,
    RUN: tl.constexpr,
    QUARTER: tl.constexpr,
    EVEN: tl.constexpr,
    SIXTEEN: tl.constexpr,
    MANTISSA: tl.constexpr,
    PTX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """outᵀ = weight · xᵀ + bias (or None): the weight is the operand that may stay in registers. Grid (tiles, splits).

    ``RUN`` of a part's quarters share a scale.
    """
    program = tl.program_id(0)
    row_tile, column_tile = find_tile(program, tl.cdiv(num_rows, ROWS), tl.cdiv(num_out, COLUMNS), GROUP)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    row_exists = row < num_rows
    column_exists = column < num_out
    lane = tl.arange(0, QUARTER)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + lane[None, :]
    words_at = words + column.to(tl.int64)[:, None] * QUARTER + lane[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    first = tl.program_id(1) * steps_per_split
    end = tl.minimum(tl.cdiv(num_in, 4 * QUARTER), first + steps_per_split)
    scale = load_scales(scales, first, num_groups, num_out, column, column_exists, QUARTERS_PER_GROUP, RUN)
    minimum = load_scales(minimums, first, num_groups, num_out, column, column_exists, QUARTERS_PER_GROUP, RUN)
    for part in range(first, end):
        tile = tl.load(words_at + tl.cast(part, tl.int64) * num_out * QUARTER, mask=column_exists[:, None], other=0)
        # The compiler fetches ahead what products read; scales come after them.
        next_scale = load_scales(scales, part + 1, num_groups, num_out, column, column_exists, QUARTERS_PER_GROUP, RUN)
        next_minimum = load_scales(
            minimums, part + 1, num_groups, num_out, column, column_exists, QUARTERS_PER_GROUP, RUN
        )
        for run in tl.static_range(4 // RUN):
            product = tl.zeros([COLUMNS, ROWS], tl.float32)
            x_run = tl.zeros([ROWS, QUARTER], tl.float32)
            for index in tl.static_range(run * RUN, run * RUN + RUN):
                start = (4 * part + index) * QUARTER
                exists = row_exists[:, None]
                if not EVEN:
                    exists = exists & (start + lane < num_in)[None, :]
                x_tile = tl.load(x_at + start, mask=exists, other=0.0)
                weight = unpack(tile, x, index, SIXTEEN, MANTISSA, PTX)
                x_run += x_tile.to(tl.float32)
                if UPCAST:
                    x_tile = x_tile.to(tl.float32)
                    weight = weight.to(tl.float32)
                product = tl.dot(weight, tl.trans(x_tile), product, input_precision="ieee")
            factor = scale[run].to(tl.float32)
            offset = minimum[run].to(tl.float32) - 16 * factor
            total += factor[:, None] * product
            total += offset[:, None] * tl.sum(x_run, axis=1)[None, :]
        scale = next_scale
        minimum = next_minimum
    inside = column_exists[:, None] & row_exists[None, :]
    if scratch is not None:
        total, is_last = add_splits(total, inside, scratch, counters, program)
        inside = inside & is_last
    if bias is not None:
        total += tl.load(bias + column, mask=column_exists, other=0.0).to(tl.float32)[:, None]
    out_at = out + row.to(tl.int64)[None, :] * num_out + column[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """An ``Int4Weight`` in the kernel's layout, without its permutation."""

    words: Tensor
    """int16 ``[parts, out, 32]``"""
    scales: Tensor
    """``[groups, out]``"""
    minimums: Tensor
    num_in: int
    quarters_per_group: int


def pack(weight: Int4Weight) -> PackedWeight:
    """Raises ValueError if groups are no multiple of 32 input channels and no whole rows."""
    num_out, num_in = weight.packed.shape[0], 2 * weight.packed.shape[1]
    num_parts = triton.cdiv(num_in, PART)
    is_whole_row = weight.scales.shape[1] == 1
    if weight.group_size % QUARTER and not is_whole_row:
        raise ValueError(
            f"groups of {weight.group_size} input channels: must be a multiple of {QUARTER}, or whole rows"
        )
    numbers = torch.stack((weight.packed & 15, weight.packed >> 4), dim=-1).view(num_out, num_in).to(torch.int16)
    quarters = F.pad(numbers, (0, num_parts * PART - num_in)).view(num_out, num_parts, 4, QUARTER).unbind(2)
    words = quarters[0] | quarters[1] << 4 | quarters[2] << 8 | quarters[3] << 12
    return PackedWeight(
        words.transpose(0, 1).contiguous(),
        weight.scales.T.contiguous(),
        weight.minimums.T.contiguous(),
        num_in,
        4 * num_parts if is_whole_row else weight.group_size // QUARTER,
    )


def int4_gemm(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, grid: Grid, counters: Tensor, device: Device
) -> Tensor:
    """``[T, out]`` in x's dtype, from ``x [T, in]``."""
    num_rows, num_out, tile = x.shape[0], weight.words.shape[1], grid.tile
    out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device)
    sixteen, mantissa = SIXTEEN[x.dtype]
    interpreted = triton.knobs.runtime.interpret
    if num_rows == 0:
        return out
    int4_gemm_kernel[(grid.num_tiles, grid.num_splits)](
        x,
        weight.words,
        weight.scales,
        weight.minimums,
        bias,
        out,
        grid.scratch(torch.float32, x.device),
        counters,
        num_rows,
        num_out,
        weight.num_in,
        weight.scales.shape[0],
        x.stride(0),
        grid.steps_per_split,
        QUARTERS_PER_GROUP=weight.quarters_per_group,
        RUN=math.gcd(weight.quarters_per_group, 4),
        QUARTER=QUARTER,
        EVEN=weight.num_in % PART == 0,
        SIXTEEN=sixteen,
        MANTISSA=mantissa,
        PTX=not (interpreted or device.is_amd or x.dtype == torch.float32),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        GROUP=TILES_IN_GROUP,
        # Triton's interpreter, in which the tests run, keeps bfloat16 as integers and would multiply those.
        UPCAST=interpreted and x.dtype == torch.bfloat16,
        **tile.options(device),
    )
    return out
