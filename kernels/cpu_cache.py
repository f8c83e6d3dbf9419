"""Writing K and V to the paged cache, and copying blocks, on CPUs."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np
import torch
from numba import carray, prange
from torch import Tensor

from . import reference
from .cpu_numba import PARALLEL_ELEMENTS, Kernel, claim_threads, compile_kernel, helper, pointer
from .kv_cache import KVCache, KVPool

_f32 = np.float32


@helper
def _copy_row(source_at, target_at, size):
    source = carray(pointer(source_at), (size,), _f32)
    target = carray(pointer(target_at), (size,), _f32)
    for i in range(size):
        target[i] = source[i]


def _build_write_kv(parallel: bool) -> Kernel:
    def write_kv(
        k_at,
        k_stride,
        v_at,
        v_stride,
        k_cache_at,
        v_cache_at,
        slots_at,
        slot_words,
        rows,
        heads,
        block_size,
        size,
        threads,
    ):
        # Slots are read as int32: of an int64 the low word, which on the little-endian machines that we run on comes
        # first, holds any slot below 2^31 and -1 alike.
        slots = carray(pointer(slots_at), (rows * slot_words,), np.int32)
        workers = threads if parallel else 1
        for worker in prange(workers):
            for row in range(worker, rows, workers):
                slot = np.int64(slots[row * slot_words])
                if slot < 0:
                    continue
                block, offset = slot // block_size, slot % block_size
                for head in range(heads):
                    to = 4 * size * ((block * heads + head) * block_size + offset)
                    _copy_row(k_at + 4 * (row * k_stride + head * size), k_cache_at + to, size)
                    _copy_row(v_at + 4 * (row * v_stride + head * size), v_cache_at + to, size)

    return compile_kernel(write_kv, parallel=parallel)


_WRITE_KV = {parallel: _build_write_kv(parallel) for parallel in (False, True)}


def write_kv(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """See ``reference.write_kv``."""
    if key.dtype != torch.float32 or cache.key.dtype != torch.float32:
        reference.write_kv(key, value, cache, slot_mapping)
        return
    rows, heads, size = key.shape
    threads = 1 if key.numel() < PARALLEL_ELEMENTS else claim_threads()
    _WRITE_KV[threads > 1](
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        cache.key.data_ptr(),
        cache.value.data_ptr(),
        slot_mapping.data_ptr(),
        slot_mapping.element_size() // 4,
        rows,
        heads,
        cache.key.shape[2],
        size,
        threads,
    )


def copy_blocks(pool: KVPool, copies: Tensor) -> None:
    """See ``reference.copy_blocks``. A few large copies: plain slices are memcpy, whatever the dtype."""
    for source, destination in copies.tolist():
        for tensor in pool.tensors():
            tensor[:, :, destination] = tensor[:, :, source]
