"""Matrix products by int8 weights on CPUs with AMX, for any number of rows; see cpu_linear_int8.py and cpu_amx.py."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, prange
from torch import Tensor

from .cpu_amx import AMX_DEPTH, AMX_PANEL, AMX_ROWS, SIDE, amx_tile, configure_tiles, has_amx, release_tiles
from .cpu_linear_float import as_rows, bias_of, padded
from .cpu_numba import Kernel, claim_threads, compile_kernel, fingerprint, helper, pointer
from .cpu_quantize import QUANTIZE, DigitSum, quantize_token
from .cpu_tiles import rows_of_block
from .cpu_vectors import fetch_and_increment
from .quantized import Int8Weight

PARALLEL_BYTES = 262_144
"""A smaller weight is multiplied with a row by the calling thread alone; see ``cpu_numba.PARALLEL_ELEMENTS``."""

ROWS_PER_READ = 64
"""Multiplying so many rows with a weight takes about as long as reading it from memory."""

FEW_TOKENS = 32
"""Up to so many are quantised by each thread for itself: sharing them would take a second parallel region."""

_COUNTER_BYTES = 64


@helper
def _address(task, panels, panels_at, depth):
    return panels_at + task % panels * depth * AMX_PANEL


def _build_product(parallel: bool) -> Kernel:
    sources = fingerprint(__file__)

    def product(
        x_at,
        x_stride,
        tokens,
        digits,
        width,
        scratch_at,
        own,
        weight_at,
        depth,
        panels,
        scales_at,
        bias_at,
        out_at,
        threads,
    ):
        """Scratch memory holds a counter and the quantised rows; or each thread's, ``own`` bytes apart, made here.

        A task is a panel and a block of rows. Threads take one after the other: with equal shares all would wait for
        one that lost its processor meanwhile. Each is taken one ahead, to prefetch its weights at the end of another.
        """
        _ = sources  # for the cache's key
        rows = digits * tokens
        workers = threads if parallel else 1
        block_rows = rows_of_block(rows, AMX_ROWS, panels, workers)
        tasks = -(-rows // block_rows) * panels
        carray(pointer(scratch_at), (1,), np.int64)[0] = 0
        for worker in prange(workers):
            values_at = scratch_at + _COUNTER_BYTES + own * worker
            x_scales_at = values_at + -(-rows // SIDE) * SIDE * depth
            if own > 0:
                for row in range(tokens):
                    at = x_at + row * x_stride
                    quantize_token(at, width, digits, row, tokens, values_at, depth, x_scales_at)
            configure_tiles()
            task = fetch_and_increment(scratch_at)
            while task < tasks:
                following = fetch_and_increment(scratch_at)
                panel, begin = task % panels, task // panels * block_rows
                to_prefetch = _address(following, panels, weight_at, depth)
                for row in range(begin, min(begin + block_rows, rows), AMX_ROWS):
                    amx_tile(
                        min(AMX_ROWS, rows - row),
                        values_at + row * depth,
                        x_scales_at + 4 * row,
                        _address(task, panels, weight_at, depth),
                        to_prefetch,
                        depth,
                        scales_at + 4 * panel * AMX_PANEL,
                        bias_at + 4 * panel * AMX_PANEL,
                        out_at + 4 * (row * panels + panel) * AMX_PANEL,
                        4 * panels * AMX_PANEL,
                    )
                    to_prefetch = 0
                task = following
            release_tiles()

    return compile_kernel(product, parallel=parallel, exact=True)


_PRODUCT = {parallel: _build_product(parallel) for parallel in (False, True)}


class AmxInt8Linear:
    """``x [T, in] -> [T, out]``, see ``reference.prepare_linear``; a row's product does not depend on other rows.

    Raises RuntimeError where ``has_amx`` is false.
    """

    def __init__(self, weight: Int8Weight, bias: Tensor | None = None) -> None:
        if not has_amx():
            raise RuntimeError("this process may not use AMX")
        self._in = weight.values.shape[1]
        self._panels = _to_tiles(weight.values)
        self._size = self._panels.numel()
        self._num_panels, self._depth = self._panels.shape[0], self._panels.shape[1] * AMX_DEPTH
        self._scales = padded(weight.scales.float(), AMX_PANEL)
        self._sum = DigitSum(weight, bias)
        self._bias = bias_of(self._sum.num_out, self._sum.early_bias, AMX_PANEL)
        at = self._scales.data_ptr(), self._bias.data_ptr()
        self._weight_at = self._panels.data_ptr(), self._depth, self._num_panels, *at

    def __call__(self, x: Tensor) -> Tensor:
        rows = as_rows(x)
        num_tokens, num_digits = rows.shape[0], self._sum.num_digits
        num_rows = num_digits * num_tokens
        is_small = (ROWS_PER_READ + num_rows) * self._size < ROWS_PER_READ * PARALLEL_BYTES
        threads = 1 if is_small else claim_threads()
        x_at = rows.data_ptr(), 4 * rows.stride(0), num_tokens, num_digits, self._in
        capacity = -(-num_rows // SIDE) * SIDE
        own = capacity * (self._depth + 4)
        shared = threads > 1 and num_tokens > FEW_TOKENS
        scratch = torch.empty(_COUNTER_BYTES + own * (1 if shared else threads), dtype=torch.int8)
        scratch_at = scratch.data_ptr()
        if shared:
            values_at = scratch_at + _COUNTER_BYTES
            scales_at = values_at + capacity * self._depth
            QUANTIZE[True](*x_at, values_at, self._depth, scales_at, threads)
        out = rows.new_empty((num_rows, self._num_panels * AMX_PANEL))
        _PRODUCT[threads > 1](*x_at, scratch_at, 0 if shared else own, *self._weight_at, out.data_ptr(), threads)
        return self._sum(out, x)


def _to_tiles(values: Tensor) -> Tensor:
    """``[out, in] -> [out / AMX_PANEL, in / AMX_DEPTH, 2, 16, 16 * 4]``, zeros filled up in both: see cpu_amx.py."""
    whole = F.pad(values, (0, -values.shape[1] % AMX_DEPTH, 0, -values.shape[0] % AMX_PANEL))
    fours = whole.view(torch.int32).view(-1, 2, SIDE, whole.shape[1] // AMX_DEPTH, AMX_DEPTH // 4)
    return fours.permute(0, 3, 1, 4, 2).contiguous().view(torch.int8)
