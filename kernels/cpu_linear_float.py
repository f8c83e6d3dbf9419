"""Matrix products by float32 weights on CPUs, by the tiles of cpu_tiles.py."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from .cpu_numba import Kernel, claim_threads, compile_kernel, fingerprint
from .cpu_tiles import PANEL, TILE_ROWS, float_tile, place_of_task, rows_of_block, take_tasks

PARALLEL_PRODUCTS = 131_072
"""Fewer multiplications than this are done by the calling thread alone; see ``cpu_numba.PARALLEL_ELEMENTS``."""


def _build(parallel: bool) -> Kernel:
    sources = fingerprint(__file__)

    def product(x_at, x_stride, rows, panels_at, depth, panels, bias_at, out_at, threads):
        _ = sources  # for the cache's key
        workers = threads if parallel else 1
        block_rows = rows_of_block(rows, TILE_ROWS, panels, workers)
        tasks = -(-rows // block_rows) * panels
        taken = np.zeros(1, np.int64)
        taken_at = taken.ctypes.data
        for _worker in prange(workers):
            first, last = take_tasks(taken_at, tasks, workers)
            while first < last:
                for task in range(first, last):
                    panel, begin, end, tile_rows = place_of_task(task, panels, block_rows, rows, TILE_ROWS)
                    for row in range(begin, end, tile_rows):
                        float_tile(
                            min(tile_rows, end - row),
                            x_at + row * x_stride,
                            x_stride,
                            panels_at + 4 * panel * depth * PANEL,
                            depth,
                            bias_at + 4 * panel * PANEL,
                            0,
                            out_at + 4 * (row * panels + panel) * PANEL,
                            4 * panels * PANEL,
                        )
                first, last = take_tasks(taken_at, tasks, workers)
        return taken[0]  # which lives until here

    return compile_kernel(product, parallel=parallel, exact=True)


_PRODUCT = {parallel: _build(parallel) for parallel in (False, True)}


class FloatLinear:
    """``x [T, in] -> [T, out]`` by a float32 ``weight [out, in]``. A row's product does not depend on other rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._out, self._depth = weight.shape
        self._panels = to_panels(weight.detach(), PANEL)
        self._num_panels = self._panels.shape[0]
        self._size = self._panels.numel()
        self._bias = bias_of(self._out, bias, PANEL)
        self._weight_at = self._panels.data_ptr(), self._depth, self._num_panels, self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        rows = as_rows(x)
        num_rows = rows.shape[0]
        out = rows.new_empty((num_rows, self._num_panels * PANEL))
        threads = 1 if num_rows * self._size < PARALLEL_PRODUCTS else claim_threads()
        kernel = _PRODUCT[threads > 1]
        kernel(rows.data_ptr(), 4 * rows.stride(0), num_rows, *self._weight_at, out.data_ptr(), threads)
        return finished(out, self._out, x)


def as_rows(x: Tensor) -> Tensor:
    """x in float32, each row contiguous."""
    rows = x if x.dtype == torch.float32 else x.float()
    return rows if rows.stride(1) == 1 else rows.contiguous()


def padded(x: Tensor, multiple: int) -> Tensor:
    """x, filled up with zeros to a multiple of elements in its first dimension."""
    missing = -x.shape[0] % multiple
    return torch.cat((x, x.new_zeros((missing, *x.shape[1:])))) if missing else x.contiguous()


def bias_of(size: int, bias: Tensor | None, panel: int) -> Tensor:
    """float32, zeros without one, filled up to whole panels."""
    return padded(torch.zeros(size) if bias is None else bias.detach().float(), panel)


def to_panels(rows: Tensor, panel: int) -> Tensor:
    """``[out, n] -> [out / panel, n, panel]``, the last one filled up with zeros."""
    return padded(rows, panel).view(-1, panel, rows.shape[1]).transpose(1, 2).contiguous()


def finished(out: Tensor, size: int, x: Tensor) -> Tensor:
    """The first ``size`` columns, in x's dtype."""
    whole = out if out.shape[1] == size else out[:, :size].contiguous()
    return whole if x.dtype == torch.float32 else whole.to(x.dtype)
