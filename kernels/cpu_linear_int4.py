"""Matrix products by 4-bit weights on CPUs: half a byte is read for each weight, and all is computed in float32.

A panel of one group of input channels at a time is widened to float32, in a first-level cache, and passed over the
rows by a tile of cpu_tiles.py. Widening it once serves all rows of a block.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import prange
from torch import Tensor

from .cpu_linear_float import as_rows, bias_of, finished, to_panels
from .cpu_numba import Kernel, claim_threads, compile_kernel, fingerprint
from .cpu_tiles import PANEL, TILE_ROWS, float_tile, place_of_task, rows_of_block, take_tasks, widen_int4
from .quantized import Int4Weight

PARALLEL_PRODUCTS = 131_072
"""Fewer multiplications than this are done by the calling thread alone; see ``cpu_numba.PARALLEL_ELEMENTS``."""


def _build(parallel: bool) -> Kernel:
    sources = fingerprint(__file__)

    def product(x_at, x_stride, rows, codes_at, scales_at, minimums_at, groups, size, panels, bias_at, out_at, threads):
        """Tasks as in cpu_linear_float; groups of ``size`` input channels."""
        _ = sources  # for the cache's key
        workers = threads if parallel else 1
        block_rows = rows_of_block(rows, TILE_ROWS, panels, workers)
        tasks = -(-rows // block_rows) * panels
        out_stride = 4 * panels * PANEL
        taken = np.zeros(1, np.int64)
        taken_at = taken.ctypes.data
        for _worker in prange(workers):
            wide = np.empty((size, PANEL), np.float32)
            first, last = take_tasks(taken_at, tasks, workers)
            while first < last:
                for task in range(first, last):
                    panel, begin, end, tile_rows = place_of_task(task, panels, block_rows, rows, TILE_ROWS)
                    for group in range(groups):
                        place = panel * groups + group
                        widen_int4(
                            codes_at + place * (size // 2) * PANEL,
                            size // 2,
                            scales_at + 4 * place * PANEL,
                            minimums_at + 4 * place * PANEL,
                            wide.ctypes.data,
                        )
                        for row in range(begin, end, tile_rows):
                            to = out_at + row * out_stride + 4 * panel * PANEL
                            float_tile(
                                min(tile_rows, end - row),
                                x_at + row * x_stride + 4 * group * size,
                                x_stride,
                                wide.ctypes.data,
                                size,
                                to if group else bias_at + 4 * panel * PANEL,
                                out_stride if group else 0,
                                to,
                                out_stride,
                            )
                first, last = take_tasks(taken_at, tasks, workers)
        return taken[0]  # which lives until here

    return compile_kernel(product, parallel=parallel, exact=True)


_PRODUCT = {parallel: _build(parallel) for parallel in (False, True)}


class Int4Linear:
    """``x [T, in] -> [T, out]``, see ``reference.prepare_linear``. A row's product does not depend on other rows."""

    def __init__(self, weight: Int4Weight, bias: Tensor | None = None) -> None:
        self._out = weight.packed.shape[0]
        self._codes = to_panels(weight.packed, PANEL)
        self._scales = to_panels(weight.scales.float(), PANEL)
        self._minimums = to_panels(weight.minimums.float(), PANEL)
        self._permutation = weight.permutation
        self._bias = bias_of(self._out, bias, PANEL)
        self._num_panels = self._codes.shape[0]
        self._size = 2 * self._codes.numel()
        tensors = self._codes, self._scales, self._minimums
        groups = weight.scales.shape[1], weight.group_size, self._num_panels
        self._weight_at = *(tensor.data_ptr() for tensor in tensors), *groups, self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        rows = as_rows(x if self._permutation is None else x.index_select(1, self._permutation))
        num_rows = rows.shape[0]
        out = rows.new_empty((num_rows, self._num_panels * PANEL))
        threads = 1 if num_rows * self._size < PARALLEL_PRODUCTS else claim_threads()
        kernel = _PRODUCT[threads > 1]
        kernel(rows.data_ptr(), 4 * rows.stride(0), num_rows, *self._weight_at, out.data_ptr(), threads)
        return finished(out, self._out, x)
