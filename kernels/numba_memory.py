"""How numba kernels see tensors: as an address and sizes, and numbers as bits.

Handing an array to numba costs about a microsecond, an integer 50 ns. A step of a small model calls some two hundred
kernels, so a kernel takes ``tensor.data_ptr()`` and makes the array inside.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing_context: Any, address: Any) -> Any:
    """The address as a void pointer, for ``numba.carray``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate
