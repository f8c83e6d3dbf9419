"""LoRA adapters on CPUs, by the tiles of cpu_tiles.py: rows that follow each other and have one adapter share a tile.

A sequence's rows follow each other, so that its prompt is taken a whole tile at a time. The first product goes to
scratch, a task for each few rows; the second is added to what the layer gave, a task for each panel of a few rows.
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

from .adapters import RowAdapters, check_adapter, check_sizes
from .cpu_linear_float import PARALLEL_PRODUCTS, to_panels
from .cpu_numba import exact_helper, fingerprint, pointer
from .cpu_program import Launch, Team
from .cpu_team import compile_work, note_done, take, words
from .cpu_tiles import PANEL, TILE_ROWS, float_tile

_f32, _i32 = np.float32, np.int32


@exact_helper
def _end_of_run(slots, row, end):
    """The first row from ``row`` on with another adapter, ``end`` at most."""
    after = row + 1
    while after < end and slots[after] == slots[row]:
        after += 1
    return after


@functools.cache
def _shrink() -> Any:
    sources = fingerprint(__file__)

    def shrink(words_at, call_at, tally_at, member, team):
        """A task is a panel of ranks and TILE_ROWS rows."""
        _ = sources  # for the cache's key
        x_at, x_stride, depth, panels_at, panels, slots_at, zeros_at, out_at = words(words_at, 8)
        (rows,) = words(call_at, 1)
        slots, tasks = carray(pointer(slots_at), (rows,), _i32), -(-rows // TILE_ROWS) * panels
        task, _end = take(tally_at, tasks, 1)
        while task < tasks:
            row, panel = task // panels * TILE_ROWS, task % panels
            end = min(row + TILE_ROWS, rows)
            while row < end:
                after = _end_of_run(slots, row, end)
                if slots[row] >= 0:
                    panel_at = panels_at + 4 * (np.int64(slots[row]) * panels + panel) * depth * PANEL
                    to = out_at + 4 * (row * panels + panel) * PANEL
                    at, stride = x_at + row * x_stride, 4 * panels * PANEL
                    float_tile(after - row, at, x_stride, panel_at, depth, zeros_at, 0, to, stride, panel_at, 4 * PANEL)
                row = after
            note_done(tally_at, task, task + 1)
            task, _end = take(tally_at, tasks, 1)
        return tasks

    return compile_work(shrink, exact=True)


@exact_helper
def _copy(source_at, source_stride, to_at, to_stride, rows, width):
    for row in range(rows):
        source = carray(pointer(source_at + row * source_stride), (width,), _f32)
        carray(pointer(to_at + row * to_stride), (width,), _f32)[:] = source


@functools.cache
def _expand() -> Any:
    sources = fingerprint(__file__)

    def expand(words_at, call_at, tally_at, member, team):
        """A task is a panel of outputs and TILE_ROWS rows. The sum is taken in scratch: a row of ``out`` may end
        within the last panel."""
        _ = sources  # for the cache's key
        x_at, x_stride, depth, panels_at, panels, slots_at, out_at, out_stride, width = words(words_at, 9)
        (rows,) = words(call_at, 1)
        slots, tasks = carray(pointer(slots_at), (rows,), _i32), -(-rows // TILE_ROWS) * panels
        scratch = np.zeros((TILE_ROWS, PANEL), np.float32)
        scratch_at = scratch.ctypes.data
        task, _end = take(tally_at, tasks, 1)
        while task < tasks:
            row, panel = task // panels * TILE_ROWS, task % panels
            end, columns = min(row + TILE_ROWS, rows), min(width - panel * PANEL, PANEL)
            while row < end:
                after = _end_of_run(slots, row, end)
                if slots[row] >= 0:
                    panel_at = panels_at + 4 * (np.int64(slots[row]) * panels + panel) * depth * PANEL
                    at, to = x_at + row * x_stride, out_at + row * out_stride + 4 * panel * PANEL
                    _copy(to, out_stride, scratch_at, 4 * PANEL, after - row, columns)
                    float_tile(
                        after - row,
                        at,
                        x_stride,
                        panel_at,
                        depth,
                        scratch_at,
                        4 * PANEL,
                        scratch_at,
                        4 * PANEL,
                        panel_at,
                        4 * PANEL,
                    )
                    _copy(scratch_at, 4 * PANEL, to, out_stride, after - row, columns)
                row = after
            note_done(tally_at, task, task + 1)
            task, _end = take(tally_at, tasks, 1)
        return tasks

    return compile_work(expand, exact=True)


class Adapters:
    """See ``adapters.AdapterProduct``. Compiles when it is made."""

    def __init__(
        self,
        team: Team,
        num_slots: int,
        max_rank: int,
        num_in: int,
        num_out: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        check_sizes(num_slots, max_rank)
        if dtype != torch.float32:
            raise ValueError(f"adapters on CPUs are float32, as activations are there; dtype is {dtype}")
        self._team = team
        self._sizes = num_slots, max_rank, num_in, num_out
        self._rank_panels, self._out_panels = -(-max_rank // PANEL), -(-num_out // PANEL)
        self._first = torch.zeros(num_slots, self._rank_panels, num_in, PANEL, device=device)
        self._second = torch.zeros(num_slots, self._out_panels, max_rank, PANEL, device=device)
        self._zeros = torch.zeros(PANEL)
        self._shrink, self._expand = _shrink().address, _expand().address

    def load(self, slot: int, a: Tensor, b: Tensor) -> None:
        check_adapter(slot, a, b, *self._sizes)
        panels = to_panels(a.float(), PANEL)
        self._first[slot].zero_()
        self._second[slot].zero_()
        self._first[slot, : panels.shape[0]] = panels
        self._second[slot, :, : a.shape[0]] = to_panels(b.float(), PANEL)

    def __call__(self, x: Tensor, out: Tensor, rows: RowAdapters) -> Tensor:
        _, max_rank, num_in, num_out = self._sizes
        if x.dtype != torch.float32 or out.dtype != torch.float32 or x.stride(1) != 1 or out.stride(1) != 1:
            raise ValueError(f"adapters on CPUs take contiguous rows of float32, got {x.dtype} and {out.dtype}")
        num_rows = x.shape[0]
        inner = self._team.empty(num_rows, self._rank_panels * PANEL)
        slots_at, of_inner = rows.slots.data_ptr(), (inner.data_ptr(), 4 * inner.stride(0))
        first = self._first.data_ptr(), self._rank_panels, slots_at, self._zeros.data_ptr(), inner.data_ptr()
        second = self._second.data_ptr(), self._out_panels, slots_at, out.data_ptr(), 4 * out.stride(0), num_out
        launches = [
            Launch(self._shrink, (x.data_ptr(), 4 * x.stride(0), num_in, *first)),
            Launch(self._expand, (*of_inner, max_rank, *second)),
        ]
        is_small = num_rows * max_rank * (num_in + num_out) < PARALLEL_PRODUCTS
        self._team.run(launches, num_rows, is_small=is_small)
        return out
