"""Writing K and V to the paged cache, and copying blocks, on CPUs."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from . import reference
from .cpu_numba import (
    PARALLEL_ELEMENTS,
    bits_of_float,
    exact_helper,
    fingerprint,
    float_of_bits,
    largest_magnitude,
    pointer,
)
from .cpu_program import Launch, Team
from .cpu_team import compile_work, note_done, rows_at_once, take, words
from .kv_cache import LARGEST, SMALLEST_SCALE, KVCache, KVPool

_f32, _i32 = np.float32, np.int32
_LARGEST_INT8, _LARGEST_FP8 = _f32(LARGEST[torch.int8]), _f32(LARGEST[torch.float8_e4m3fn])
_SMALLEST_SCALE = _f32(SMALLEST_SCALE)


@exact_helper
def _copy_row(source_at, target_at, size):
    source = carray(pointer(source_at), (size,), _f32)
    target = carray(pointer(target_at), (size,), _f32)
    for i in range(size):
        target[i] = source[i]


@exact_helper
def _scale_of(source, largest):
    scale = largest_magnitude(source) / largest
    return _SMALLEST_SCALE if scale < _SMALLEST_SCALE else scale


@exact_helper
def _quantize_int8(source_at, target_at, scale_at, size):
    source = carray(pointer(source_at), (size,), _f32)
    target = carray(pointer(target_at), (size,), np.int8)
    scale = _scale_of(source, _LARGEST_INT8)
    carray(pointer(scale_at), (1,), _f32)[0] = scale
    for i in range(size):
        target[i] = np.int8(_i32(np.rint(source[i] / scale)))


@exact_helper
def _quantize_fp8(source_at, target_at, scale_at, size):
    """e4m3's code is a float32's exponent and three bits of its mantissa; below 2^-6, how many times 2^-9."""
    source = carray(pointer(source_at), (size,), _f32)
    target = carray(pointer(target_at), (size,), np.int8)
    scale = _scale_of(source, _LARGEST_FP8)
    carray(pointer(scale_at), (1,), _f32)[0] = scale
    for i in range(size):
        bits = bits_of_float(source[i] / scale)
        magnitude = bits & _i32(0x7FFFFFFF)
        # Half of what is cut off, less one, and the last bit that stays: ties go to the even code.
        rounded = (magnitude + _i32(0x7FFFF) + ((magnitude >> _i32(20)) & _i32(1))) >> _i32(20)
        code = min(rounded - _i32(120 << 3), _i32(0x7F))
        if magnitude < _i32(121 << 23):
            code = _i32(np.rint(float_of_bits(magnitude) * _f32(512)))
        target[i] = np.int8(code | ((bits >> _i32(24)) & _i32(0x80)))


@exact_helper
def _write_row(source_at, cache_at, scales_at, row, size, kind):
    if kind == "float32":
        _copy_row(source_at, cache_at + 4 * size * row, size)
    elif kind == "int8":
        _quantize_int8(source_at, cache_at + size * row, scales_at + 4 * row, size)
    else:
        _quantize_fp8(source_at, cache_at + size * row, scales_at + 4 * row, size)


@functools.cache
def _write_kv_work(kind: str) -> Any:
    sources = fingerprint(__file__)

    def write_kv(words_at, call_at, tally_at, member, team):
        _ = sources  # for the cache's key
        k_at, k_stride, v_at, v_stride, k_cache_at, v_cache_at, k_scales_at, v_scales_at = words(words_at, 8)
        slots_at, slot_words, heads, block_size, size = words(words_at + 64, 5)
        (rows,) = words(call_at, 1)
        # Slots are read as int32: of an int64 the low word, which on the little-endian machines that we run on comes
        # first, holds any slot below 2^31 and -1 alike.
        slots = carray(pointer(slots_at), (rows * slot_words,), np.int32)
        at_once = rows_at_once(2 * heads * size)
        first, last = take(tally_at, rows, at_once)
        while first < last:
            for row in range(first, last):
                slot = np.int64(slots[row * slot_words])
                if slot < 0:
                    continue
                block, offset = slot // block_size, slot % block_size
                for head in range(heads):
                    to = (block * heads + head) * block_size + offset
                    _write_row(k_at + 4 * (row * k_stride + head * size), k_cache_at, k_scales_at, to, size, kind)
                    _write_row(v_at + 4 * (row * v_stride + head * size), v_cache_at, v_scales_at, to, size, kind)
            note_done(tally_at, first, last)
            first, last = take(tally_at, rows, at_once)
        return rows

    return compile_work(write_kv)


def write_kv(team: Team, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """See ``reference.write_kv``."""
    stored = cache.key.dtype
    if key.dtype != torch.float32 or (stored != torch.float32 and stored not in LARGEST):
        team.must_not_record(f"a KV cache of {stored} for {key.dtype}")
        reference.write_kv(key, value, cache, slot_mapping)
        return
    rows, heads, size = key.shape
    given = key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0)
    scales = (0 if scale is None else scale.data_ptr() for scale in (cache.key_scale, cache.value_scale))
    at = *given, cache.key.data_ptr(), cache.value.data_ptr(), *scales
    slots = slot_mapping.data_ptr(), slot_mapping.element_size() // 4
    work = _write_kv_work(str(stored).removeprefix("torch."))
    launch = Launch(work.address, (*at, *slots, heads, cache.key.shape[2], size))
    team.run([launch], rows, is_small=key.numel() < PARALLEL_ELEMENTS)


def copy_blocks(pool: KVPool, copies: Tensor) -> None:
    """See ``reference.copy_blocks``. A few large copies: plain slices are memcpy, whatever the dtype."""
    for source, destination in copies.tolist():
        for tensor in pool.tensors():
            tensor[:, :, destination] = tensor[:, :, source]
