"""Matrix products by float32 weights on CPUs, by the tiles of cpu_tiles.py."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .cpu_columns import Finish
from .cpu_numba import fingerprint
from .cpu_program import Launch, Team
from .cpu_team import compile_work, note_done, take, takes_ahead, words
from .cpu_tiles import PANEL, TILE_ROWS, float_tile, place_of_task, rows_of_block, what_to_prefetch

PARALLEL_PRODUCTS = 131_072
"""Fewer multiplications than this are done by the calling thread alone; see ``cpu_numba.PARALLEL_ELEMENTS``."""


@functools.cache
def _product() -> Any:
    sources = fingerprint(__file__)

    def product(words_at, call_at, tally_at, member, team):
        """A task is a panel and a block of rows, taken one ahead where there are many, to prefetch its weights."""
        _ = sources  # for the cache's key
        x_at, x_stride, panels_at, depth, panels, bias_at, out_at = words(words_at, 7)
        (rows,) = words(call_at, 1)
        block_rows = rows_of_block(rows, TILE_ROWS, panels, team)
        tasks = -(-rows // block_rows) * panels
        task, _ = take(tally_at, tasks, 1)
        reserves = takes_ahead(tasks, team)
        while task < tasks:
            following = take(tally_at, tasks, 1)[0] if reserves else task + team
            panel, begin, end, tile_rows = place_of_task(task, panels, block_rows, rows, TILE_ROWS)
            panel_at = panels_at + 4 * panel * depth * PANEL
            following_at = panels_at + 4 * (following % panels) * depth * PANEL
            tiles = -(-(end - begin) // tile_rows)
            for tile in range(tiles):
                row = begin + tile * tile_rows
                ahead, ahead_step = what_to_prefetch(tile, tiles, panel_at, following_at, depth)
                float_tile(
                    min(tile_rows, end - row),
                    x_at + row * x_stride,
                    x_stride,
                    panel_at,
                    depth,
                    bias_at + 4 * panel * PANEL,
                    0,
                    out_at + 4 * (row * panels + panel) * PANEL,
                    4 * panels * PANEL,
                    ahead,
                    ahead_step,
                )
            note_done(tally_at, task, task + 1)
            task = following if reserves else take(tally_at, tasks, 1)[0]
        return tasks

    return compile_work(product, exact=True)


class FloatLinear:
    """``x [T, in] -> [T, out]`` by a float32 ``weight [out, in]``. A row's product does not depend on other rows."""

    def __init__(self, team: Team, weight: Tensor, bias: Tensor | None = None) -> None:
        self._team = team
        self._finish = Finish(team, weight.shape[0])
        self._panels = to_panels(weight.detach(), PANEL)
        self._num_panels, self._depth = self._panels.shape[:2]
        self._bias = bias_of(weight.shape[0], bias, PANEL)
        self._weight_at = self._panels.data_ptr(), self._depth, self._num_panels, self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        rows = as_rows(self._team, x)
        num_rows = rows.shape[0]
        out = self._team.empty(num_rows, self._num_panels * PANEL)
        at = rows.data_ptr(), 4 * rows.stride(0), *self._weight_at, out.data_ptr()
        is_small = num_rows * self._panels.numel() < PARALLEL_PRODUCTS
        self._team.run([Launch(_product().address, at)], num_rows, is_small=is_small)
        return self._finish(out, x)


def as_rows(team: Team, x: Tensor) -> Tensor:
    """x in float32, each row contiguous."""
    if x.dtype == torch.float32 and x.stride(1) == 1:
        return x
    team.must_not_record("a product of rows that are not contiguous float32")
    return x.float().contiguous()


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
