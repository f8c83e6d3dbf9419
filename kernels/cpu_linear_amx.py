"""Matrix products by int8 and bfloat16 weights on CPUs with AMX, for any number of rows; see cpu_amx.py."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu_amx import AMX_DEPTH, AMX_PANEL, AMX_ROWS, SIDE, amx_tile, configure_tiles, has_amx, release_tiles
from .cpu_columns import Finish
from .cpu_linear_float import as_rows, bias_of, padded
from .cpu_numba import fingerprint, helper
from .cpu_program import Launch, Team
from .cpu_quantize import finish_int8, quantize_launch, round_launch
from .cpu_team import compile_work, note_done, take, takes_ahead, words
from .cpu_tiles import rows_of_block
from .quantized import Int8Weight

PARALLEL_BYTES = 262_144
"""A smaller weight is multiplied with a row by the calling thread alone; see ``cpu_numba.PARALLEL_ELEMENTS``."""

ROWS_PER_READ = 64
"""Multiplying so many rows with a weight takes about as long as reading it from memory."""


@helper
def _address(task, panels, panels_at, depth):
    return panels_at + task % panels * depth * AMX_PANEL


@functools.cache
def _product(dtype: torch.dtype) -> Any:
    sources, is_half = fingerprint(__file__), dtype == torch.bfloat16

    def product(words_at, call_at, tally_at, member, team):
        """A task is a panel and a block of rows, taken one ahead where there are many, to prefetch its weights."""
        _ = sources  # for the cache's key
        values_at, x_scales_at, digits, weight_at, depth, panels, scales_at, bias_at, out_at = words(words_at, 9)
        rows = digits * words(call_at, 1)[0]
        block_rows = rows_of_block(rows, AMX_ROWS, panels, team)
        tasks = -(-rows // block_rows) * panels
        task, _ = take(tally_at, tasks, 1)
        if task >= tasks:
            return tasks
        configure_tiles()
        reserves = takes_ahead(tasks, team)
        while task < tasks:
            following = take(tally_at, tasks, 1)[0] if reserves else task + team
            panel, begin = task % panels, task // panels * block_rows
            to_prefetch = _address(following, panels, weight_at, depth)
            for row in range(begin, min(begin + block_rows, rows), AMX_ROWS):
                amx_tile(
                    is_half,
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
            note_done(tally_at, task, task + 1)
            task = following if reserves else take(tally_at, tasks, 1)[0]
        release_tiles()
        return tasks

    return compile_work(product, exact=True)


class AmxInt8Linear:
    """``x [T, in] -> [T, out]``, see ``reference.prepare_linear``; a row's product does not depend on other rows.

    Raises RuntimeError where ``has_amx`` is false.
    """

    def __init__(self, team: Team, weight: Int8Weight, bias: Tensor | None = None) -> None:
        _must_have_amx(torch.int8)
        self._team = team
        self._digits = weight.input_digits
        self._panels = _to_tiles(weight.values)
        self._num_panels, self._depth = self._panels.shape[0], self._panels.shape[1] * AMX_DEPTH
        self._scales = padded(weight.scales.float(), AMX_PANEL)
        early, self._finish = finish_int8(team, weight, bias)
        self._bias = bias_of(weight.values.shape[0], early, AMX_PANEL)
        at = self._scales.data_ptr(), self._bias.data_ptr()
        self._weight_at = self._digits, self._panels.data_ptr(), self._depth, self._num_panels, *at

    def __call__(self, x: Tensor) -> Tensor:
        rows, team = as_rows(self._team, x), self._team
        num_tokens = rows.shape[0]
        num_rows = self._digits * num_tokens
        quantize, quantized = quantize_launch(team, rows, self._digits, self._depth, multiple=SIDE)
        out = team.empty(num_rows, self._num_panels * AMX_PANEL)
        at = quantized.values.data_ptr(), quantized.scales.data_ptr(), *self._weight_at, out.data_ptr()
        team.run(
            [quantize, Launch(_product(torch.int8).address, at)], num_tokens, is_small=_is_small(num_rows, self._panels)
        )
        return self._finish(out, x)


class AmxHalfLinear:
    """``x [T, in] -> [T, out]`` in x's dtype, by a bfloat16 ``weight [out, in]``: x is rounded to it, sums are float32.

    A row's product does not depend on other rows. Raises RuntimeError where ``has_amx`` is false.
    """

    def __init__(self, team: Team, weight: Tensor, bias: Tensor | None = None) -> None:
        _must_have_amx(torch.bfloat16)
        self._team = team
        self._panels = _to_tiles(weight.detach())
        self._num_panels, self._depth = self._panels.shape[0], self._panels.shape[1] * AMX_DEPTH
        self._bias = bias_of(weight.shape[0], bias, AMX_PANEL)
        self._finish = Finish(team, weight.shape[0])
        at = self._panels.data_ptr(), self._depth, self._num_panels, 0, self._bias.data_ptr()
        self._weight_at = 0, 1, *at

    def __call__(self, x: Tensor) -> Tensor:
        rows, team = as_rows(self._team, x), self._team
        num_rows = rows.shape[0]
        narrow, values = round_launch(team, rows, self._depth // 2, multiple=SIDE)
        out = team.empty(num_rows, self._num_panels * AMX_PANEL)
        at = values.data_ptr(), *self._weight_at, out.data_ptr()
        is_small = _is_small(num_rows, self._panels)
        team.run([narrow, Launch(_product(torch.bfloat16).address, at)], num_rows, is_small=is_small)
        return self._finish(out, x)


def _must_have_amx(dtype: torch.dtype) -> None:
    if not has_amx(dtype):
        raise RuntimeError(f"this process may not use AMX for {dtype}")


def _is_small(num_rows: int, panels: Tensor) -> bool:
    return (ROWS_PER_READ + num_rows) * panels.numel() < ROWS_PER_READ * PARALLEL_BYTES


def _to_tiles(values: Tensor) -> Tensor:
    """int8 or bfloat16 ``[out, in]`` to int8 ``[out / AMX_PANEL, row bytes / AMX_DEPTH, 2, 16, 16 * 4]``, zeros filled
    up in both: see cpu_amx.py."""
    whole = F.pad(values, (0, -values.shape[1] % (AMX_DEPTH // values.itemsize), 0, -values.shape[0] % AMX_PANEL))
    words = whole.contiguous().view(torch.int32)
    tiles = words.view(-1, 2, SIDE, words.shape[1] // SIDE, SIDE)
    return tiles.permute(0, 3, 1, 4, 2).contiguous().view(torch.int8)
