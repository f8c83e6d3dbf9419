"""The inputs of products by int8 weights on CPUs: rows are quantised, each by its largest value."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import carray, prange
from torch import Tensor

from .cpu_linear_float import finished
from .cpu_numba import Kernel, compile_kernel, exact_helper, fingerprint, largest_magnitude, pointer
from .kv_cache import SMALLEST_SCALE
from .quantized import DIGIT_RATIO, LARGEST_INT8, Int8Weight

_f32 = np.float32
_LARGEST, _SMALLEST_SCALE, _RATIO = _f32(LARGEST_INT8), _f32(SMALLEST_SCALE), _f32(DIGIT_RATIO)


@exact_helper
def quantize_row(x, out):
    """The scale; ``out`` is filled up with zeros. Of a row with NaN the scale is NaN, and so is its product."""
    scale = largest_magnitude(x) / _LARGEST
    if scale < _SMALLEST_SCALE:
        scale = _SMALLEST_SCALE
    for i in range(x.size):
        out[i] = np.int32(np.rint(x[i] / scale))
    for i in range(x.size, out.size):
        out[i] = 0
    return scale


@exact_helper
def quantize_rest(x, scale, first, out):
    """The second digits of a row, see ``Int8Weight.input_digits``; their scale."""
    unit = scale / _RATIO
    for i in range(x.size):
        out[i] = np.int32(np.rint((x[i] - scale * np.float32(first[i])) / unit))
    for i in range(x.size, out.size):
        out[i] = 0
    return unit


@exact_helper
def quantize_token(x_at, width, digits, row, tokens, values_at, depth, scales_at):
    """A row's digits: its first in row ``row`` of values ``[digits * tokens, depth]``, the second ``tokens`` behind."""
    x = carray(pointer(x_at), (width,), _f32)
    scales = carray(pointer(scales_at), (digits * tokens,), _f32)
    first = carray(pointer(values_at + row * depth), (depth,), np.int8)
    scales[row] = quantize_row(x, first)
    if digits == 2:
        second = carray(pointer(values_at + (tokens + row) * depth), (depth,), np.int8)
        scales[tokens + row] = quantize_rest(x, scales[row], first, second)


def _build_quantize(parallel: bool) -> Kernel:
    sources = fingerprint(__file__)

    def quantize(x_at, x_stride, tokens, digits, width, values_at, depth, scales_at, threads):
        _ = sources  # for the cache's key
        workers = threads if parallel else 1
        for worker in prange(workers):
            for row in range(worker, tokens, workers):
                quantize_token(x_at + row * x_stride, width, digits, row, tokens, values_at, depth, scales_at)

    return compile_kernel(quantize, parallel=parallel)


QUANTIZE = {parallel: _build_quantize(parallel) for parallel in (False, True)}
"""Of rows ``x_stride`` bytes apart to values int8 ``[digits * tokens, depth]`` and scales: see ``quantize_token``."""


class DigitSum:
    """What a product ends with: from a row for each digit, ``[digits * T, out or more]``, to ``[T, out]``."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        self.num_out, self.num_digits = weight.values.shape[0], weight.input_digits
        self.early_bias = bias if self.num_digits == 1 else None
        """To be added to each row; with two digits it is added to the sum of both."""
        self._late_bias = bias if self.num_digits == 2 else None

    def __call__(self, out: Tensor, x: Tensor) -> Tensor:
        """In x's dtype. ``out`` may be overwritten."""
        if self.num_digits == 1:
            return finished(out, self.num_out, x)
        first, second = out.view(2, -1, out.shape[1])
        total = finished(first.add_(second), self.num_out, x)
        return total if self._late_bias is None else total + self._late_bias.to(total.dtype)
