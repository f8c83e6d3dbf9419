"""Matrix products by int8 weights on CPUs: inputs quantised token by token, sums exact in int32 ("W8A8").

For processors without AMX (with it, see cpu_linear_amx.py). Two ways with equal results. Few rows are bound by reading
the weight, which the tiles of cpu_tiles.py do with the least around it. For more, oneDNN has the byte products of newer
processors (VNNI). Without those it saturates at 16 bits, and the tiles do it all.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np
import torch
from numba import carray, prange
from torch import Tensor

from .cpu_linear_float import as_rows, bias_of, padded
from .cpu_numba import PARALLEL_ELEMENTS, Kernel, claim_threads, compile_kernel, exact_helper, fingerprint, pointer
from .cpu_quantize import QUANTIZE, DigitSum, quantize_rest, quantize_row
from .cpu_tiles import INT8_DEPTH, INT8_PANEL, INT8_TILE_ROWS, int8_tile, place_of_task, rows_of_block, take_tasks
from .quantized import Int8Weight

PARALLEL_PRODUCTS = 524_288
"""Fewer multiplications than this are done by the calling thread alone; see ``cpu_numba.PARALLEL_ELEMENTS``."""

PARALLEL_ROWS = 16
"""Fewer rows than this are quantised by the calling thread alone."""

TILED_ROWS = 12
"""Up to so many rows the tiles are faster than oneDNN."""

_f32 = np.float32


@exact_helper
def _finish_row(out, scale, bias):
    for i in range(out.size):
        out[i] = out[i] * scale + bias[i]


def _build_product(parallel: bool) -> Kernel:
    sources = fingerprint(__file__)

    def product(x_at, x_stride, tokens, digits, width, panels_at, depth, panels, scales_at, bias_at, out_at, threads):
        """Rows are quantised, second digits after all first ones; then as cpu_linear_float's."""
        _ = sources  # for the cache's key
        rows = digits * tokens
        x_scales, quantized = np.empty(rows, _f32), np.empty((rows, depth), np.int16)
        workers = threads if parallel else 1
        quantizers = 1 if tokens < PARALLEL_ROWS else workers
        for worker in prange(quantizers):
            for row in range(worker, tokens, quantizers):
                x = carray(pointer(x_at + row * x_stride), (width,), _f32)
                x_scales[row] = quantize_row(x, quantized[row])
                if digits == 2:
                    rest = tokens + row
                    x_scales[rest] = quantize_rest(x, x_scales[row], quantized[row], quantized[rest])
        block_rows = rows_of_block(rows, INT8_TILE_ROWS, panels, workers)
        tasks = -(-rows // block_rows) * panels
        taken = np.zeros(1, np.int64)
        taken_at = taken.ctypes.data
        for _worker in prange(workers):
            first, last = take_tasks(taken_at, tasks, workers)
            while first < last:
                for task in range(first, last):
                    panel, begin, end, tile_rows = place_of_task(task, panels, block_rows, rows, INT8_TILE_ROWS)
                    for row in range(begin, end, tile_rows):
                        int8_tile(
                            min(tile_rows, end - row),
                            quantized.ctypes.data + 2 * row * depth,
                            2 * depth,
                            x_scales.ctypes.data + 4 * row,
                            panels_at + panel * depth * INT8_PANEL,
                            depth,
                            scales_at + 4 * panel * INT8_PANEL,
                            bias_at + 4 * panel * INT8_PANEL,
                            out_at + 4 * (row * panels + panel) * INT8_PANEL,
                            4 * panels * INT8_PANEL,
                        )
                first, last = take_tasks(taken_at, tasks, workers)
        return taken[0]  # which lives until here

    return compile_kernel(product, parallel=parallel, exact=True)


def _build_finish(parallel: bool) -> Kernel:
    sources = fingerprint(__file__)

    def finish(out_at, rows, width, scales_at, bias_at, threads):
        _ = sources  # for the cache's key
        scales = carray(pointer(scales_at), (rows,), _f32)
        bias = carray(pointer(bias_at), (width,), _f32)
        workers = threads if parallel else 1
        for worker in prange(workers):
            for row in range(worker, rows, workers):
                _finish_row(carray(pointer(out_at + 4 * row * width), (width,), _f32), scales[row], bias)

    return compile_kernel(finish, parallel=parallel)


_PRODUCT = {parallel: _build_product(parallel) for parallel in (False, True)}
_FINISH = {parallel: _build_finish(parallel) for parallel in (False, True)}


class Int8Linear:
    """``x [T, in] -> [T, out]``, see ``reference.prepare_linear``; a row's product does not depend on other rows."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None = None) -> None:
        self._panels = _to_pairs(weight.values)
        self._num_panels, self._size = self._panels.shape[0], self._panels.numel()
        self._scales = padded(weight.scales.float(), INT8_PANEL)
        self._sum = DigitSum(weight, bias)
        self._digits = weight.input_digits
        self._bias = bias_of(self._sum.num_out, self._sum.early_bias, INT8_PANEL)
        depth = 2 * self._panels.shape[1]
        at = self._scales.data_ptr(), self._bias.data_ptr()
        self._weight_at = weight.values.shape[1], self._panels.data_ptr(), depth, self._num_panels, *at
        self._packed = OneDnnInt8(weight) if has_byte_products() else None

    def __call__(self, x: Tensor) -> Tensor:
        rows = as_rows(x)
        num_tokens = rows.shape[0]
        num_rows = self._digits * num_tokens
        if self._packed is not None and num_rows > TILED_ROWS:
            return self._sum(self._packed(rows, self._bias), x)
        out = rows.new_empty((num_rows, self._num_panels * INT8_PANEL))
        threads = 1 if num_rows * self._size < PARALLEL_PRODUCTS else claim_threads()
        at = rows.data_ptr(), 4 * rows.stride(0), num_tokens, self._digits
        _PRODUCT[threads > 1](*at, *self._weight_at, out.data_ptr(), threads)
        return self._sum(out, x)


class OneDnnInt8:
    """The same by oneDNN. float32 rows, and a bias of at least ``out`` elements; a row of sums for each digit."""

    def __init__(self, weight: Int8Weight) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(weight.values, None)
        self._scales = weight.scales.float()
        self._digits = weight.input_digits
        self._zeros = torch.zeros(weight.values.shape[0], dtype=torch.int32)

    def __call__(self, x: Tensor, bias: Tensor) -> Tensor:
        num_tokens, width = x.shape
        num_rows = self._digits * num_tokens
        values, x_scales = x.new_empty((num_rows, width), dtype=torch.int8), x.new_empty(num_rows)
        threads = _threads_for(x.numel())
        to = values.data_ptr(), width, x_scales.data_ptr(), threads
        QUANTIZE[threads > 1](x.data_ptr(), 4 * x.stride(0), num_tokens, self._digits, width, *to)
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            values, 1.0, 0, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        threads = _threads_for(out.numel())
        at = out.data_ptr(), num_rows, out.shape[1], x_scales.data_ptr(), bias.data_ptr()
        _FINISH[threads > 1](*at, threads)
        return out


def has_byte_products() -> bool:
    """Whether oneDNN multiplies bytes fast and exactly here: with VNNI."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(supported and supported()) and hasattr(torch.ops.onednn, "qlinear_pointwise")


def _threads_for(num_elements: int) -> int:
    return 1 if num_elements < PARALLEL_ELEMENTS else claim_threads()


def _to_pairs(values: Tensor) -> Tensor:
    """``[out, in] -> [out / INT8_PANEL, in / 2, INT8_PANEL, 2]``, filled up with zeros in both."""
    whole = padded(padded(values, INT8_PANEL).t(), INT8_DEPTH)
    return whole.view(whole.shape[0] // 2, 2, -1, INT8_PANEL).permute(2, 0, 3, 1).contiguous()
