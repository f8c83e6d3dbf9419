"""Matrix products by AMX tiles: Intel's matrix units, eight registers of 16 rows of 64 bytes each.

One instruction adds the product of two tiles to a third: ``tdpbssd`` 16,384 of bytes, exact in int32, ``tdpbf16ps``
8,192 of bfloat16, in float32. For bytes:

    a  16 rows x 64 input channels        b  16 groups of 4 input channels x (16 outputs, 4)
    c  16 rows x 16 outputs               c[m, n] += sum over k, j: a[m, 4 k + j] * b[k, n, j]

and the same with 32 channels in groups of two. Here 16 or 32 rows are multiplied with 32 outputs, so that each tile
that is loaded is used twice. Fewer rows take as long as 16: they wait for the weight to come from memory either way.
"""

# Intrinsics are functions of numba's compiler.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .cpu_llvm import F32, FEATURES, I8, I32, I64, load, plus, prefetch, splat, store, vector_of
from .cpu_tiles import PREFETCH_BYTES

SIDE = 16
"""Rows of a tile; outputs of a tile of weights or sums."""
AMX_PANEL = 2 * SIDE
AMX_DEPTH = 64
"""Bytes of a tile's row: 64 input channels, or 32 of bfloat16."""
AMX_ROWS = 2 * SIDE
"""Most rows of a call."""

_TILE_BYTES = 1024
_STEP_BYTES = 2 * _TILE_BYTES
"""Of a panel, for AMX_DEPTH input channels."""
_A, _B, _C = (0, 1), (2, 3), ((4, 5), (6, 7))
"""The registers: tiles of rows, of weights, and of the sums of each two."""

_FEATURES = {torch.int8: "amx-int8", torch.bfloat16: "amx-bf16"}
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18

_sixteen_floats, _sixteen_ints = vector_of(F32, SIDE), vector_of(I32, SIDE)


@functools.cache
def has_amx(dtype: torch.dtype) -> bool:
    """Whether this processor has AMX for int8 or bfloat16, and Linux, which must be asked, lets this process use it."""
    feature = _FEATURES.get(dtype)
    if feature is None or not FEATURES.get(feature) or platform.system() != "Linux":
        return False
    system_call = ctypes.CDLL(None).syscall
    return bool(system_call(_ARCH_PRCTL, _REQUEST_PERMISSION, ctypes.c_ulong(_TILE_DATA)) == 0)


@intrinsic
def configure_tiles(typing_context: Any) -> Any:
    """All eight registers in full size. Before ``amx_tile``, by each thread."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # Byte 0: the palette, 1. From 16 on the bytes of a row, as int16; from 48 on the rows.
        layout = [1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[SIDE] * 8, *[0] * 8]
        kind = ir.ArrayType(I8, 64)
        place = cgutils.alloca_once(builder, kind)
        builder.store(ir.Constant(kind, layout), place)
        _call(builder, "ldtilecfg", builder.bitcast(place, cgutils.voidptr_t))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def release_tiles(typing_context: Any) -> Any:
    """After ``amx_tile``: others configure them in their own way, and the system need not save them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)
def amx_tile(
    typing_context: Any, HALF, rows, x, x_scales, panel, following, depth, scales, bias, out, out_stride
) -> Any:
    """``out[r, :AMX_PANEL] = (x[r, :depth] @ panel) * scales * x_scales[r] + bias``, 1 to AMX_ROWS rows.

    Addresses. x int8, the panel int8 ``[depth / 64, 2, 16, 16, 4]``, all else float32. With HALF, which is literal, x
    is bfloat16, the panel ``[depth / 64, 2, 16, 16, 2]``, and there are no scales. depth, in bytes, is a multiple of
    AMX_DEPTH. x has memory for a multiple of 16 rows, whatever is in it. ``following`` is the panel that will be read
    next, and both are prefetched; 0 where this one was read just now.
    """
    is_half = bool(HALF.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, rows, x, x_scales, panel, following, depth, *rest = arguments
        sums = cgutils.alloca_once(builder, ir.ArrayType(I32, AMX_ROWS * AMX_PANEL))
        sums_at = builder.ptrtoint(sums, I64)
        _sum_tiles(builder, "tdpbf16ps" if is_half else "tdpbssd", rows, x, panel, following, depth, sums_at)
        _finish(builder, is_half, rows, sums_at, x_scales, *rest)
        return context.get_dummy_value()

    return types.void(HALF, *[types.int64] * 10), generate


def _sum_tiles(builder, multiply, rows, x, panel, following, depth, sums_at) -> None:
    """int32 or float32 ``[AMX_ROWS, AMX_PANEL]``, the second half zeros where there are no such rows."""
    for tile in (tile for pair in _C for tile in pair):
        _call(builder, "tilezero", I8(tile))
    panel_bytes = builder.mul(depth, I64(AMX_PANEL))
    is_new = builder.icmp_signed("!=", following, I64(0))
    has_second = builder.icmp_signed(">", rows, I64(SIDE))
    second = builder.add(x, builder.mul(depth, I64(SIDE)))
    with cgutils.for_range(builder, builder.udiv(depth, I64(AMX_DEPTH))) as loop:
        at, channel = (builder.mul(loop.index, I64(size)) for size in (_STEP_BYTES, AMX_DEPTH))
        with builder.if_then(is_new):
            _prefetch_step(builder, panel, panel_bytes, following, plus(builder, at, PREFETCH_BYTES))
        for j in (0, 1):
            _load_tile(builder, _B[j], plus(builder, builder.add(panel, at), _TILE_BYTES * j), I64(64))
        _multiply(builder, multiply, 0, builder.add(x, channel), depth)
        with builder.if_then(has_second):
            _multiply(builder, multiply, 1, builder.add(second, channel), depth)
    for i, j in ((i, j) for i in (0, 1) for j in (0, 1)):
        to = plus(builder, sums_at, 4 * (i * SIDE * AMX_PANEL + j * SIDE))
        _call(builder, "tilestored64", I8(_C[i][j]), _pointer(builder, to), I64(4 * AMX_PANEL))


def _multiply(builder, multiply, i, x, depth) -> None:
    """A tile of rows with both of weights."""
    _load_tile(builder, _A[i], x, depth)
    for j in (0, 1):
        _call(builder, multiply, I8(_C[i][j]), I8(_A[i]), I8(_B[j]))


def _prefetch_step(builder, panel, panel_bytes, following, offset) -> None:
    """What lies ``offset`` behind the panel's begin, the following panel joined to its end."""
    inside = builder.icmp_signed("<", offset, panel_bytes)
    behind = builder.add(following, builder.sub(offset, panel_bytes))
    at = builder.select(inside, builder.add(panel, offset), behind)
    for line in range(0, _STEP_BYTES, 64):
        prefetch(builder, plus(builder, at, line))


def _finish(builder, is_half, rows, sums_at, x_scales, scales, bias, out, out_stride) -> None:
    halves = (0, 64)
    factors = [None if is_half else load(builder, plus(builder, scales, half), _sixteen_floats) for half in halves]
    offsets = [load(builder, plus(builder, bias, half), _sixteen_floats) for half in halves]
    with cgutils.for_range(builder, rows) as loop:
        sums = builder.add(sums_at, builder.mul(loop.index, I64(4 * AMX_PANEL)))
        to = builder.add(out, builder.mul(loop.index, out_stride))
        x_scale_at = builder.add(x_scales, builder.mul(loop.index, I64(4)))
        for half, factor, offset in zip(halves, factors, offsets, strict=True):
            at = plus(builder, sums, half)
            product = load(builder, at, _sixteen_floats) if is_half else _scaled(builder, at, factor, x_scale_at)
            store(builder, builder.fadd(product, offset), plus(builder, to, half))


def _scaled(builder, sums_at, factor, x_scale_at):
    total = builder.sitofp(load(builder, sums_at, _sixteen_ints), _sixteen_floats)
    x_scale = splat(builder, load(builder, x_scale_at, F32), SIDE)
    return builder.fmul(builder.fmul(total, factor), x_scale)


def _load_tile(builder, tile, address, stride) -> None:
    _call(builder, "tileloadd64", I8(tile), _pointer(builder, address), stride)


def _pointer(builder, address):
    return builder.inttoptr(address, cgutils.voidptr_t)


def _call(builder, name, *operands) -> None:
    kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), operands)
