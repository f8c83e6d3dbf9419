"""Vector code that numba is not to be talked into, as LLVM instructions: what attention's arithmetic is made of.

Loops that LLVM would vectorise by itself are left to it. These keep a block of sums in registers while they go over
memory once, which takes knowing the number of registers and literal sizes: a parameter named in capitals here must be a
literal (or a value that the kernel closes over) where it is called. ``KIND`` is the stored dtype's name: ``float32``,
``int8`` or ``float8_e4m3fn``. An fp8 number comes out as 1/256 of itself (``FP8_UNIT``): its bits are those of a
float16 then, and the processor widens it. Rows are contiguous; addresses are integers.
"""

# Intrinsics are functions of numba's compiler.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .cpu_llvm import (
    F16,
    F32,
    FEATURES,
    I8,
    I16,
    I32,
    I64,
    constant,
    load,
    plus,
    prefetch,
    shuffle,
    splat,
    store,
    vector_of,
)

_WIDE = FEATURES.get("avx512f", False)
LANES = 16 if _WIDE else 8
"""float32 in the processor's widest vector."""
_ACCUMULATORS = 24 if _WIDE else 12
"""Vectors of sums: of 32 or 16 registers, those that hold no operand."""
ROWS = 6
"""Rows of a matrix product that share each load of its right factor."""
FP8_UNIT = 256.0


def _lanes(width: int) -> int:
    return next(lanes for lanes in (16, 8, 4) if lanes <= LANES and width % lanes == 0)


def _load(builder: Any, base: Any, index: int, lanes: int, kind: str = "float32") -> Any:
    """Elements ``index`` to ``index + lanes`` behind an address, as float32."""
    if kind == "float32":
        return load(builder, plus(builder, base, 4 * index), vector_of(F32, lanes))
    stored = load(builder, plus(builder, base, index), vector_of(I8, lanes))
    if kind == "int8":
        return builder.sitofp(builder.sext(stored, vector_of(I32, lanes)), vector_of(F32, lanes))
    # s eeee mmm becomes float16's s 0eeee mmm0000000; shifted, the sign is there twice, and one of the two is erased.
    bits = builder.shl(builder.sext(stored, vector_of(I16, lanes)), constant(I16, lanes, 7))
    half = builder.bitcast(builder.and_(bits, constant(I16, lanes, 0xBFFF)), vector_of(F16, lanes))
    return builder.fpext(half, vector_of(F32, lanes))


def _store(builder: Any, value: Any, base: Any, index: int) -> None:
    store(builder, value, plus(builder, base, 4 * index))


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a × b + c in one rounding where the processor can."""
    name = f"llvm.fmuladd.v{a.type.count}f32"
    function_type = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), [a, b, c])


def larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def fold(builder: Any, combine: Callable[[Any, Any], Any], vector: Any, lanes: int) -> Any:
    """A vector's parts of ``lanes``, combined."""
    while vector.type.count > lanes:
        half = vector.type.count // 2
        low, high = (shuffle(builder, vector, vector, list(range(at, at + half))) for at in (0, half))
        vector = combine(low, high)
    return vector


def _pair_sums(builder: Any, a: Any, b: Any) -> Any:
    """Of each four lanes: a0 + a1, a2 + a3, b0 + b1, b2 + b3."""
    lanes = a.type.count
    even = [at + index for at in range(0, lanes, 4) for index in (0, 2, lanes, lanes + 2)]
    return builder.fadd(shuffle(builder, a, b, even), shuffle(builder, a, b, [index + 1 for index in even]))


def _sum_each(builder: Any, vectors: list[Any]) -> Any:
    """The sums of one vector, or of four vectors, over their lanes."""
    if len(vectors) == 1:
        return fold(builder, builder.fadd, vectors[0], 1)
    a, b, c, d = vectors
    pairs = _pair_sums(builder, _pair_sums(builder, a, b), _pair_sums(builder, c, d))
    return fold(builder, builder.fadd, pairs, 4)


def _literals(*arguments: Any) -> list[Any]:
    return [argument.literal_value for argument in arguments]


Generator = Callable[[Any, Any, Any, Any], Any]


@intrinsic(prefer_literal=True)
def dot_rows(
    typing_context: Any, a_at: Any, b_at: Any, out_at: Any, M: Any, N: Any, WIDTH: Any, STRIDE: Any, KIND: Any
) -> Any:
    """``out[m, n] = a[m] . b[n]``: a ``[M, WIDTH]``; b ``[N, WIDTH]`` of KIND, N 1 or 4; out ``[M, STRIDE]``."""
    num_rows, num_columns, width, stride, kind = _literals(M, N, WIDTH, STRIDE, KIND)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, out = arguments[:3]
        lanes, most_rows = _lanes(width), _ACCUMULATORS // num_columns
        for first in range(0, num_rows, most_rows):
            rows = range(first, min(first + most_rows, num_rows))
            sums = [[constant(F32, lanes, 0)] * num_columns for _ in rows]
            for at in range(0, width, lanes):
                left = [_load(builder, a, row * width + at, lanes) for row in rows]
                for n in range(num_columns):
                    right = _load(builder, b, n * width + at, lanes, kind)
                    for m in range(len(rows)):
                        sums[m][n] = multiply_add(builder, left[m], right, sums[m][n])
            for row, of_row in zip(rows, sums, strict=True):
                _store(builder, _sum_each(builder, of_row), out, row * stride)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, M, N, WIDTH, STRIDE, KIND), generate


@intrinsic(prefer_literal=True)
def add_product(
    typing_context: Any, a_at: Any, a_stride: Any, b_at: Any, depth: Any, c_at: Any, M: Any, WIDTH: Any, KIND: Any
) -> Any:
    """``c += a b``: a float32 ``[M, depth]``, rows a_stride apart; b ``[depth, WIDTH]`` of KIND; c ``[M, WIDTH]``."""
    num_rows, width, kind = _literals(M, WIDTH, KIND)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _product(builder, arguments[:5], num_rows, width, width, kind, from_zero=False)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, M, WIDTH, KIND), generate


@intrinsic(prefer_literal=True)
def set_product(
    typing_context: Any, a_at: Any, a_stride: Any, b_at: Any, depth: Any, c_at: Any, M: Any, WIDTH: Any, STRIDE: Any
) -> Any:
    """``c = a b``, all float32, of the first WIDTH columns of b ``[depth, STRIDE]`` and c ``[M, STRIDE]``."""
    num_rows, width, stride = _literals(M, WIDTH, STRIDE)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _product(builder, arguments[:5], num_rows, width, stride, "float32", from_zero=True)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, M, WIDTH, STRIDE), generate


def _product(
    builder: Any, operands: Any, num_rows: int, width: int, stride: int, kind: str, *, from_zero: bool
) -> None:
    lanes = _lanes(width)
    for first in range(0, num_rows, ROWS):
        rows = range(first, min(first + ROWS, num_rows))
        columns = lanes * max(1, _ACCUMULATORS // len(rows))
        for at in range(0, width, columns):
            places = [(row, column) for row in rows for column in range(at, min(at + columns, width), lanes)]
            _product_block(builder, operands, places, lanes, stride, kind, from_zero)


def _product_block(
    builder: Any, operands: Any, places: list[tuple[int, int]], lanes: int, stride: int, kind: str, from_zero: bool
) -> None:
    a, a_stride, b, depth, c = operands
    size = 4 if kind == "float32" else 1
    rows, columns = (list(dict.fromkeys(numbers)) for numbers in zip(*places, strict=True))
    sums = {place: cgutils.alloca_once(builder, ir.VectorType(F32, lanes)) for place in places}
    for row, column in places:
        first = constant(F32, lanes, 0) if from_zero else _load(builder, c, row * stride + column, lanes)
        builder.store(first, sums[row, column])
    of_row = {row: builder.add(a, builder.mul(a_stride, I64(4 * row))) for row in rows}
    with cgutils.for_range(builder, depth) as loop:
        b_row = builder.add(b, builder.mul(loop.index, I64(size * stride)))
        right = {column: _load(builder, b_row, column, lanes, kind) for column in columns}
        for row in rows:
            left = splat(builder, load(builder, builder.add(of_row[row], builder.mul(loop.index, I64(4))), F32), lanes)
            for column in columns:
                place = sums[row, column]
                builder.store(multiply_add(builder, left, right[column], builder.load(place)), place)
    for row, column in places:
        _store(builder, builder.load(sums[row, column]), c, row * stride + column)


@intrinsic(prefer_literal=True)
def widen_row(typing_context: Any, source_at: Any, target_at: Any, WIDTH: Any, KIND: Any) -> Any:
    """WIDTH numbers of KIND as float32."""
    width, kind = _literals(WIDTH, KIND)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = _lanes(width)
        for at in range(0, width, lanes):
            _store(builder, _load(builder, arguments[0], at, lanes, kind), arguments[1], at)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, WIDTH, KIND), generate


@intrinsic(prefer_literal=True)
def largest_of(typing_context: Any, at: Any, WIDTH: Any) -> Any:
    """The largest of WIDTH float32 (LLVM leaves such a loop as it is: one after another)."""
    (width,) = _literals(WIDTH)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes, pick = _lanes(width), functools.partial(larger, builder)
        vectors = [_load(builder, arguments[0], index, lanes) for index in range(0, width, lanes)]
        vector = fold(builder, pick, functools.reduce(pick, vectors), 1)
        return builder.extract_element(vector, I32(0))

    return types.float32(types.int64, WIDTH), generate


@intrinsic(prefer_literal=True)
def transpose(typing_context: Any, source_at: Any, target_at: Any, HEIGHT: Any, WIDTH: Any, STRIDE: Any) -> Any:
    """``target[w, h] = source[h, w]``, float32, target's rows STRIDE apart: each round shuffles a square's rows as
    cards, half into half."""
    height, width, stride = _literals(HEIGHT, WIDTH, STRIDE)
    lanes = min(_lanes(height), _lanes(width))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = arguments[:2]
        with (
            cgutils.for_range(builder, I64(height // lanes)) as down,
            cgutils.for_range(builder, I64(width // lanes)) as right,
        ):
            corner = builder.add(builder.mul(down.index, I64(width)), right.index)
            turned = builder.add(builder.mul(right.index, I64(stride)), down.index)
            source_corner = builder.add(source, builder.mul(corner, I64(4 * lanes)))
            target_corner = builder.add(target, builder.mul(turned, I64(4 * lanes)))
            rows = [_load(builder, source_corner, row * width, lanes) for row in range(lanes)]
            for row, vector in enumerate(_turn(builder, rows)):
                _store(builder, vector, target_corner, row * stride)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, HEIGHT, WIDTH, STRIDE), generate


def _turn(builder: Any, rows: list[Any]) -> list[Any]:
    lanes = len(rows)
    zip_low = [index for at in range(lanes // 2) for index in (at, lanes + at)]
    zip_high = [index + lanes // 2 for index in zip_low]
    for _ in range(lanes.bit_length() - 1):
        pairs = zip(rows[: lanes // 2], rows[lanes // 2 :], strict=True)
        rows = [shuffle(builder, a, b, zipped) for a, b in pairs for zipped in (zip_low, zip_high)]
    return rows


@intrinsic(prefer_literal=True)
def prefetch_rows(typing_context: Any, at: Any, N: Any, WIDTH: Any, KIND: Any) -> Any:
    """Asks for the lines of N rows, which will soon be read; of any address, even one of no memory."""
    num_rows, width, kind = _literals(N, WIDTH, KIND)
    num_bytes = num_rows * width * (4 if kind == "float32" else 1)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        for offset in range(0, num_bytes, 64):
            prefetch(builder, plus(builder, arguments[0], offset))
        return context.get_dummy_value()

    return types.void(types.int64, N, WIDTH, KIND), generate
