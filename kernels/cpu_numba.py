"""What all numba kernels share: how they are compiled, and how they see tensors.

A kernel takes ``tensor.data_ptr()`` and makes the array inside: an array argument costs a microsecond, an integer 50
ns. What a model's layers call is for a team to launch (cpu_team.py). What is called once a step of the engine is built
twice: the serial build touches no thread pool and is used for small work and for one thread.

Compiled code is cached on disk (``NUMBA_CACHE_DIR``). numba's cache keys know a kernel's own source file and the values
that it closes over, but neither its compile options nor the helpers that it calls. Therefore each build closes over the
``fingerprint`` of its file, and ``parallel`` where there are two; and over no compiled function (those never compare
equal in another process).

An array that a parallel loop writes is made inside the loop: numba drops writes to one made before it as unused.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

Kernel: TypeAlias = Callable[..., None]

PARALLEL_ELEMENTS = 32_768
"""Elementwise work below this many elements is done by the calling thread alone: waking another costs 4 to 16 µs."""

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    # Everything but "ninf": a logit may be -inf.
    "fastmath": {"nnan", "nsz", "arcp", "contract", "afn", "reassoc"},
    # Python's error model would test every divisor for zero, and such a loop is not vectorised.
    "error_model": "numpy",
}

_f32 = np.float32
_i32 = np.int32

_EXACT = _OPTIONS | {"fastmath": False}


def compile_kernel(function: Callable[..., None], *, parallel: bool, exact: bool = False) -> Kernel:
    """Compiles at the first call, without the GIL while it runs; loads from the cache where it can.

    ``exact``: every operation is done and rounded as it is written.
    """
    options = _EXACT if exact else _OPTIONS
    return numba.njit(parallel=parallel, cache=True, **options)(function)  # type: ignore[no-any-return]


def compile_callback(function: Callable[..., Any], signature: Any, *, exact: bool = False) -> Any:
    """Compiles now, or loads from the cache, what kernels call by its ``address``. Keep what is returned."""
    return numba.cfunc(signature, cache=True, **(_EXACT if exact else _OPTIONS))(function)


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function that kernels call."""
    return numba.njit(**_OPTIONS)(function)  # type: ignore[no-any-return]


def exact_helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, every operation done and rounded as it is written."""
    return numba.njit(**_EXACT)(function)  # type: ignore[no-any-return]


def fingerprint(file: str) -> str:
    """What changes when a file does, or one of this folder's that it imports, directly or not."""
    paths, digest = [Path(file)], hashlib.sha256()
    for path in paths:  # which grow meanwhile
        content, imported = _source(path)
        digest.update(content)
        paths += [other for other in imported if other not in paths]
    return digest.hexdigest()


@functools.cache
def _source(path: Path) -> tuple[bytes, tuple[Path, ...]]:
    """Of a file: its content, and the others of its folder that it imports. No kernel calls ``reference``."""
    content, names = path.read_bytes(), []
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names += [node.module] if node.module else [alias.name for alias in node.names]
    return content, tuple(path.with_name(f"{name}.py") for name in dict.fromkeys(names) if name != "reference")


def claim_threads() -> int:
    """torch's thread count, to which numba's parallel kernels called from this thread are then limited as well."""
    num_threads: int = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    if num_threads > 1:
        numba.set_num_threads(num_threads)
        # Starting numba's pool, at the first call, sets OpenMP's thread count, which is torch's as well, to the pool's.
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
    return num_threads


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """The address as a void pointer, for ``numba.carray``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def bits_of_float(typing_context: Any, x: Any) -> Any:
    """The 32 bits of a float32, as int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@exact_helper
def largest_magnitude(x):
    """Of float32 numbers; infinity and NaN are above all others. By bits: magnitudes are ordered like integers."""
    bits = _i32(0)
    for i in range(x.size):
        bits = max(bits, bits_of_float(x[i]) & _i32(0x7FFFFFFF))
    return float_of_bits(bits)


@helper
def fast_exp(x):
    """float32 ``exp`` for x <= 88, to 2 units in the last place; below -87 about 1e-38.

    A polynomial of degree 6 on [-ln2/2, ln2/2] (Cephes, Moshier 1989) times a power of two: unlike a call into the C
    library, LLVM turns it into vector instructions.
    """
    x = max(x, _f32(-87.0))
    exponent = np.floor(x * _f32(1.4426950408889634) + _f32(0.5))
    r = x - exponent * _f32(0.693359375) + exponent * _f32(2.12194440e-4)
    p = _f32(1.9875691500e-4)
    p = p * r + _f32(1.3981999507e-3)
    p = p * r + _f32(8.3334519073e-3)
    p = p * r + _f32(4.1665795894e-2)
    p = p * r + _f32(1.6666665459e-1)
    p = p * r + _f32(5.0000001201e-1)
    p = p * r * r + r + _f32(1.0)
    return p * float_of_bits(np.int32((np.int32(exponent) + np.int32(127)) << np.int32(23)))
