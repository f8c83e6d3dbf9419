"""Matrix products by int8 weights on CPUs: inputs quantised token by token, sums exact in int32 ("W8A8").

For processors without AMX (with it, see cpu_linear_amx.py). Two ways with equal results. Few rows are bound by reading
the weight, which the tiles of cpu_tiles.py do with the least around it. For more, oneDNN has the byte products of newer
processors (VNNI). Without those it saturates at 16 bits, and the tiles do it all.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from .cpu_linear_float import as_rows, bias_of, padded
from .cpu_numba import PARALLEL_ELEMENTS, exact_helper, fingerprint, pointer
from .cpu_program import Launch, Team
from .cpu_quantize import finish_int8, quantize_launch
from .cpu_team import compile_work, note_done, rows_at_once, share_of, take, words
from .cpu_tiles import INT8_DEPTH, INT8_PANEL, INT8_TILE_ROWS, int8_tile, place_of_task, rows_of_block
from .quantized import Int8Weight

PARALLEL_PRODUCTS = 524_288
"""Fewer multiplications than this are done by the calling thread alone; see ``cpu_numba.PARALLEL_ELEMENTS``."""

TILED_ROWS = 12
"""Up to so many rows the tiles are faster than oneDNN."""

_f32 = np.float32


@functools.cache
def _product() -> Any:
    sources = fingerprint(__file__)

    def product(words_at, call_at, tally_at, member, team):
        """A task is a panel and a block of rows."""
        _ = sources  # for the cache's key
        values_at, x_scales_at, digits, panels_at, depth, panels, scales_at, bias_at, out_at = words(words_at, 9)
        rows = digits * words(call_at, 1)[0]
        block_rows = rows_of_block(rows, INT8_TILE_ROWS, panels, team)
        tasks = -(-rows // block_rows) * panels
        first, last = take(tally_at, tasks, share_of(tasks, team))
        while first < last:
            for task in range(first, last):
                panel, begin, end, tile_rows = place_of_task(task, panels, block_rows, rows, INT8_TILE_ROWS)
                for row in range(begin, end, tile_rows):
                    int8_tile(
                        min(tile_rows, end - row),
                        values_at + 2 * row * depth,
                        2 * depth,
                        x_scales_at + 4 * row,
                        panels_at + panel * depth * INT8_PANEL,
                        depth,
                        scales_at + 4 * panel * INT8_PANEL,
                        bias_at + 4 * panel * INT8_PANEL,
                        out_at + 4 * (row * panels + panel) * INT8_PANEL,
                        4 * panels * INT8_PANEL,
                    )
            note_done(tally_at, first, last)
            first, last = take(tally_at, tasks, share_of(tasks, team))
        return tasks

    return compile_work(product, exact=True)


@functools.cache
def _scale() -> Any:
    sources = fingerprint(__file__)

    def scale(words_at, call_at, tally_at, member, team):
        """``sums [digits * T, width] * scales[:, None] + bias``, in place."""
        _ = sources  # for the cache's key
        sums_at, width, digits, scales_at, bias_at = words(words_at, 5)
        rows = digits * words(call_at, 1)[0]
        scales = carray(pointer(scales_at), (rows,), _f32)
        bias = carray(pointer(bias_at), (width,), _f32)
        first, last = take(tally_at, rows, rows_at_once(width))
        while first < last:
            for row in range(first, last):
                _scale_row(carray(pointer(sums_at + 4 * row * width), (width,), _f32), scales[row], bias)
            note_done(tally_at, first, last)
            first, last = take(tally_at, rows, rows_at_once(width))
        return rows

    return compile_work(scale, exact=True)


@exact_helper
def _scale_row(out, scale, bias):
    for i in range(out.size):
        out[i] = out[i] * scale + bias[i]


class Int8Linear:
    """``x [T, in] -> [T, out]``, see ``reference.prepare_linear``; a row's product does not depend on other rows."""

    def __init__(self, team: Team, weight: Int8Weight, bias: Tensor | None = None) -> None:
        self._team = team
        self._digits = weight.input_digits
        self._panels = _to_pairs(weight.values)
        self._num_panels, self._depth = self._panels.shape[0], 2 * self._panels.shape[1]
        self._scales = padded(weight.scales.float(), INT8_PANEL)
        early, self._finish = finish_int8(team, weight, bias)
        self._bias = bias_of(weight.values.shape[0], early, INT8_PANEL)
        at = self._scales.data_ptr(), self._bias.data_ptr()
        self._weight_at = self._digits, self._panels.data_ptr(), self._depth, self._num_panels, *at
        self._packed = OneDnnInt8(weight, self._bias) if has_byte_products() else None

    def __call__(self, x: Tensor) -> Tensor:
        rows = as_rows(self._team, x)
        if self._packed is None:
            return self._finish(self._by_tiles(rows), x)
        wide = self._team.empty(self._digits * rows.shape[0], self._bias.numel())
        self._team.call(self._by_rows, rows.shape[0], rows, wide)
        return self._finish(wide, x)

    def _by_rows(self, count: int, rows: Tensor, wide: Tensor) -> None:
        rows, num_rows = rows[:count], self._digits * count
        by_onednn = self._packed is not None and num_rows > TILED_ROWS
        product = self._packed(self._team, rows) if by_onednn else self._by_tiles(rows)  # type: ignore[misc]
        wide[:num_rows, : product.shape[1]] = product

    def _by_tiles(self, rows: Tensor) -> Tensor:
        team, num_rows = self._team, self._digits * rows.shape[0]
        quantize, quantized = quantize_launch(team, rows, self._digits, self._depth, dtype=torch.int16)
        out = team.empty(num_rows, self._num_panels * INT8_PANEL)
        at = quantized.values.data_ptr(), quantized.scales.data_ptr(), *self._weight_at, out.data_ptr()
        is_small = num_rows * self._panels.numel() < PARALLEL_PRODUCTS
        team.run([quantize, Launch(_product().address, at)], rows.shape[0], is_small=is_small)
        return out


class OneDnnInt8:
    """The same by oneDNN. float32 rows, and a bias of at least ``out`` elements; a row of sums for each digit."""

    def __init__(self, weight: Int8Weight, bias: Tensor) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(weight.values, None)
        self._scales = weight.scales.float()
        self._digits = weight.input_digits
        self._bias = bias
        self._zeros = torch.zeros(weight.values.shape[0], dtype=torch.int32)

    def __call__(self, team: Team, x: Tensor) -> Tensor:
        num_tokens, width = x.shape
        quantize, (values, x_scales) = quantize_launch(team, x, self._digits, width)
        team.run([quantize], num_tokens, is_small=x.numel() < PARALLEL_ELEMENTS)
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            values, 1.0, 0, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        at = out.data_ptr(), out.shape[1], self._digits, x_scales.data_ptr(), self._bias.data_ptr()
        team.run([Launch(_scale().address, at)], num_tokens, is_small=out.numel() < PARALLEL_ELEMENTS)
        return out


def has_byte_products() -> bool:
    """Whether oneDNN multiplies bytes fast and exactly here: with VNNI."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(supported and supported()) and hasattr(torch.ops.onednn, "qlinear_pointwise")


def _to_pairs(values: Tensor) -> Tensor:
    """``[out, in] -> [out / INT8_PANEL, in / 2, INT8_PANEL, 2]``, filled up with zeros in both."""
    whole = padded(padded(values, INT8_PANEL).t(), INT8_DEPTH)
    return whole.view(whole.shape[0] // 2, 2, -1, INT8_PANEL).permute(2, 0, 3, 1).contiguous()
