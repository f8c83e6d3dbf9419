"""The inner loops of matrix products on CPUs, written in LLVM's vectors, for numba kernels to call.

A weight ``[out, in]`` is stored in *panels* of PANEL outputs, ``[out / PANEL, in, PANEL]``: memory that a thread reads
straight through. A *tile* is a few rows of the input times one panel. Its sums stay in registers while the panel
passes by, and a vector of weights is used for every row of the tile:

    for each input channel k:    w = panel[k], two vectors        for each row:    sums[row] += x[row, k] * w

A sum runs over k in one order, whatever the number of rows, so that a row's product does not depend on the rows beside
it (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008, without its blocks of k: the
caches of today hold a whole panel).
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .cpu_llvm import F32, FEATURES, I8, I16, I32, I64, constant, load, plus, prefetch, splat, store, vector_of
from .cpu_numba import helper

_LANES = 16 if FEATURES.get("avx512f") else 8
PANEL = 2 * _LANES
"""Outputs of a panel of float32 weights."""
TILE_ROWS = 12 if _LANES == 16 else 6
"""Most rows of a tile: of 32 (without AVX-512 16) vector registers 24 (12) hold sums."""

HAS_INT8_TILE = bool(FEATURES.get("avx2"))
"""Whether this processor has the instruction of ``int8_tile``."""
BLOCK_ROWS = 384
"""A panel passes over so many rows before the next one does: they stay in a cache meanwhile."""

INT8_PANEL = 16
INT8_TILE_ROWS = 6
INT8_DEPTH = 8
"""The input channels of an int8 panel are filled up with zeros to a multiple of this."""

PREFETCH_BYTES = 4096
"""Weights are asked for so far ahead. The processor's own prefetching ends with a page; with it alone, 16 rows of
SmolLM2-135M's layers, weights from memory, took 1.4 times as long (one thread, AVX-512 and AVX2)."""

_floats = vector_of(F32, _LANES)
_eight_floats, _eight_ints = vector_of(F32, 8), vector_of(I32, 8)
_sixteen_bytes, _sixteen_words = vector_of(I8, 16), vector_of(I16, 16)


@helper
def rows_of_block(rows, tile_rows, panels, workers):
    """Work is divided into tasks, (block of rows, panel): this gives the rows of a block.

    A multiple of ``tile_rows``; fewer than BLOCK_ROWS where there would not be four tasks for each worker.
    """
    tiles = -(-rows // tile_rows)
    blocks = max(-(-rows // BLOCK_ROWS), min(tiles, -(-4 * workers // panels)))
    return -(-tiles // blocks) * tile_rows


@helper
def rows_of_tile(rows, tile_rows):
    """Rows of each tile of a block of ``rows``, so that none is much smaller than the others."""
    return -(-rows // -(-rows // tile_rows))


@helper
def place_of_task(task, panels, block_rows, rows, tile_rows):
    """Of a task: its panel, its rows from the first up to the last, which is not among them, and those of a tile."""
    begin = task // panels * block_rows
    end = min(begin + block_rows, rows)
    return task % panels, begin, end, rows_of_tile(end - begin, tile_rows)


@helper
def what_to_prefetch(tile, tiles, panel_at, following_at, depth):
    """For one of the tiles that a panel passes by: where from, and how many bytes for each input channel.

    One tile asks for its own panel, a little ahead. Several ask for the following one, a part each: memory is busy all
    the time then, where the first would wait for it and the others leave it idle. 16 rows of SmolLM2-135M's layers, one
    thread: 0.88 of the time, 48 rows 0.85.
    """
    if tiles == 1:
        return panel_at + PREFETCH_BYTES, 4 * PANEL
    step = -(-4 * PANEL // tiles)
    return following_at + tile * depth * step, step


@intrinsic
def float_tile(
    typing_context: Any, rows, x, x_stride, panel, depth, first, first_stride, out, out_stride, ahead, ahead_step
) -> Any:
    """``out[r, :PANEL] = first[r] + x[r, :depth] @ panel`` for ``rows`` rows, 1 to TILE_ROWS.

    All float32; x, panel, first and out are addresses, strides are in bytes. ``first`` is a bias with stride 0, or what
    is in ``out`` already. ``ahead`` is prefetched meanwhile, ``ahead_step`` bytes for each input channel.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _for_each_count(builder, arguments[0], TILE_ROWS, lambda rows: _float_tile(builder, rows, *arguments[1:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), generate


@intrinsic
def int8_tile(typing_context: Any, rows, x, x_stride, x_scales, panel, depth, scales, bias, out, out_stride) -> Any:
    """``out[r, :INT8_PANEL] = (x[r, :depth] @ panel) * scales * x_scales[r] + bias``, 1 to INT8_TILE_ROWS rows.

    x int16 (of bytes' size), the panel int8 ``[depth / 2, INT8_PANEL, 2]``, all else float32. One instruction
    (``vpmaddwd``) takes two input channels of eight outputs: 16 products, and the sums of neighbours in int32. Unlike
    the one that multiplies bytes (``vpmaddubsw``) it cannot overflow, so the sum is exact. With VNNI, LLVM makes one
    instruction of it and the addition.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _for_each_count(builder, arguments[0], INT8_TILE_ROWS, lambda rows: _int8_tile(builder, rows, *arguments[1:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate


@intrinsic
def widen_int4(typing_context: Any, codes, pairs, scales, minimums, out) -> Any:
    """``out[2p], out[2p + 1] = (codes[p] & 15) * scales + minimums, (codes[p] >> 4) * scales + minimums``.

    Addresses: codes uint8 ``[pairs, PANEL]``, the others float32, ``[PANEL]`` and ``[2 pairs, PANEL]``.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        codes, pairs, scales, minimums, out = arguments
        for i in (0, 1):
            at = 4 * _LANES * i
            factor, least = (load(builder, plus(builder, base, at), _floats) for base in (scales, minimums))
            with cgutils.for_range(builder, pairs) as loop:
                code_at = builder.add(plus(builder, codes, _LANES * i), builder.mul(loop.index, I64(PANEL)))
                code = load(builder, code_at, vector_of(I8, _LANES))
                code = builder.zext(code, vector_of(I32, _LANES))
                low = builder.and_(code, constant(I32, _LANES, 15))
                to = builder.add(plus(builder, out, at), builder.mul(loop.index, I64(8 * PANEL)))
                for row, part in enumerate((low, builder.lshr(code, constant(I32, _LANES, 4)))):
                    value = builder.fmul(builder.uitofp(part, _floats), factor)
                    store(builder, builder.fadd(value, least), plus(builder, to, 4 * PANEL * row))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def _for_each_count(builder: ir.IRBuilder, count: Any, most: int, emit: Callable[[int], None]) -> None:
    """The code for each number of rows, and a jump to the one that is needed."""
    end = builder.append_basic_block("end")
    switch = builder.switch(count, end)
    for rows in range(1, most + 1):
        block = builder.append_basic_block(f"rows{rows}")
        switch.add_case(I64(rows), block)
        builder.position_at_end(block)
        emit(rows)
        builder.branch(end)
    builder.position_at_end(end)


def _float_tile(
    builder, rows, x, x_stride, panel, depth, first, first_stride, out, out_stride, ahead, ahead_step
) -> None:
    sums = [[cgutils.alloca_once(builder, _floats) for _ in (0, 1)] for _ in range(rows)]
    for row, pair in enumerate(sums):
        for i, total in enumerate(pair):
            at = plus(builder, _row(builder, first, first_stride, row), 4 * _LANES * i)
            builder.store(load(builder, at, _floats), total)
    row_at = [_row(builder, x, x_stride, row) for row in range(rows)]
    with cgutils.for_range(builder, depth) as loop:
        weight_at = builder.add(panel, builder.mul(loop.index, I64(4 * PANEL)))
        ahead_at = builder.add(ahead, builder.mul(loop.index, ahead_step))
        for line in range(0, 4 * PANEL, 64):
            prefetch(builder, plus(builder, ahead_at, line))
        weights = [load(builder, plus(builder, weight_at, 4 * _LANES * i), _floats) for i in (0, 1)]
        offset = builder.mul(loop.index, I64(4))
        for at, pair in zip(row_at, sums, strict=True):
            value = splat(builder, load(builder, builder.add(at, offset), F32), _LANES)
            for weight, total in zip(weights, pair, strict=True):
                product = builder.fmul(value, weight, flags=("contract",))
                builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
    for row, pair in enumerate(sums):
        for i, total in enumerate(pair):
            store(builder, builder.load(total), plus(builder, _row(builder, out, out_stride, row), 4 * _LANES * i))


def _int8_tile(builder, rows, x, x_stride, x_scales, panel, depth, scales, bias, out, out_stride) -> None:
    chains = 4 if rows == 1 else 2 if rows <= 3 else 1  # of sums that need not wait for each other
    sums = [[[cgutils.alloca_once(builder, _eight_ints) for _ in (0, 1)] for _ in range(chains)] for _ in range(rows)]
    for total in (total for of_row in sums for pair in of_row for total in pair):
        builder.store(constant(I32, 8, 0), total)
    row_at = [_row(builder, x, x_stride, row) for row in range(rows)]
    with cgutils.for_range(builder, builder.udiv(depth, I64(2 * chains))) as loop:
        for chain in range(chains):
            step = plus(builder, builder.mul(loop.index, I64(chains)), chain)
            _int8_step(builder, step, row_at, panel, [of_row[chain] for of_row in sums])
    for row, of_row in enumerate(sums):
        at = _row(builder, out, out_stride, row)
        x_scale = splat(builder, load(builder, plus(builder, x_scales, 4 * row), F32), 8)
        for i in (0, 1):
            total = builder.load(of_row[0][i])
            for pair in of_row[1:]:
                total = builder.add(total, builder.load(pair[i]))
            product = builder.fmul(builder.sitofp(total, _eight_floats), _load_eight(builder, scales, i))
            product = builder.fadd(builder.fmul(product, x_scale), _load_eight(builder, bias, i))
            store(builder, product, plus(builder, at, 32 * i))


def _int8_step(builder, step, row_at, panel, sums) -> None:
    """Two input channels of a panel for all rows."""
    multiply = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_eight_ints, [_sixteen_words] * 2), "llvm.x86.avx2.pmadd.wd"
    )
    weight_at = builder.add(panel, builder.mul(step, I64(2 * INT8_PANEL)))
    prefetch(builder, plus(builder, weight_at, PREFETCH_BYTES))
    stored = [load(builder, plus(builder, weight_at, 16 * i), _sixteen_bytes) for i in (0, 1)]
    weights = [builder.sext(values, _sixteen_words) for values in stored]
    offset = builder.mul(step, I64(4))
    for at, pair in zip(row_at, sums, strict=True):
        values = splat(builder, load(builder, builder.add(at, offset), I32), 8)
        for weight, total in zip(weights, pair, strict=True):
            product = builder.call(multiply, [builder.bitcast(values, _sixteen_words), weight])
            builder.store(builder.add(builder.load(total), product), total)


def _row(builder, base, stride, row):
    return builder.add(base, builder.mul(stride, I64(row)))


def _load_eight(builder, base, index):
    return load(builder, plus(builder, base, 32 * index), _eight_floats)
