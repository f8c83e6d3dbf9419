"""The few LLVM instructions that CPU kernels' vector code is written in. Addresses are integers, of any alignment."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

FEATURES = binding.get_host_cpu_features()
"""What this processor has, by LLVM's names."""

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()


def vector_of(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


def constant(element: Any, lanes: int, value: float) -> Any:
    """A vector of one number."""
    return ir.Constant(vector_of(element, lanes), [value] * lanes)


def plus(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, I64(offset))


def load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def splat(builder: Any, scalar: Any, lanes: int) -> Any:
    """The scalar in every lane."""
    empty = ir.Constant(vector_of(scalar.type, lanes), ir.Undefined)
    return shuffle(builder, builder.insert_element(empty, scalar, I32(0)), empty, [0] * lanes)


def shuffle(builder: Any, a: Any, b: Any, indices: Sequence[int]) -> Any:
    """The lanes of a, then of b, with these numbers."""
    return builder.shuffle_vector(a, b, ir.Constant(vector_of(I32, len(indices)), list(indices)))


def prefetch(builder: Any, address: Any) -> None:
    """Into the first cache, to be read. An address of no memory does no harm."""
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    to_read, keep, data = I32(0), I32(3), I32(1)
    builder.call(function, [builder.inttoptr(address, cgutils.voidptr_t), to_read, keep, data])


def pause(builder: Any) -> None:
    """In a loop that waits for another thread: leaves more of the core to the thread beside it, where there is one."""
    if platform.machine() in ("x86_64", "AMD64"):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
