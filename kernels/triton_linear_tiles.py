"""What the matrix products in Triton share: the choice of a tile, the order of tiles, the sum over splits.

A product of few rows is limited by reading the weight. If it has fewer tiles than the device has multiprocessors, its
inner dimension is split over several programs for each tile. The last of them to arrive adds the partial sums, always
in the same order, so that results do not depend on who came when, and no second kernel is launched for it.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_device import Device

TILES_IN_GROUP = 8
"""So many tiles of rows take turns with the same columns, so that a tile of the weight is found in L2."""

SMALLEST_SPLIT = 512
"""Input channels; below, adding the parts costs more than the split gains."""


@triton.jit
def find_tile(program, num_row_tiles, num_column_tiles, GROUP: tl.constexpr):
    """Tile of rows and tile of columns of a program: down the columns of ``GROUP`` tiles of rows at a time."""
    first = program // (GROUP * num_column_tiles) * GROUP
    rows_in_group = tl.minimum(num_row_tiles - first, GROUP)
    index = program % (GROUP * num_column_tiles)
    return first + index % rows_in_group, index // rows_in_group


@triton.jit
def add_splits(total, inside, scratch, counters, tile):
    """Adds the ``total`` of all programs (tile, ·). Returns the sum, and whether this is the program that has it.

    The counter is 0 before and after. Only elements ``inside`` are added.
    """
    HEIGHT: tl.constexpr = total.shape[0]
    WIDTH: tl.constexpr = total.shape[1]
    num_splits = tl.num_programs(1)
    element = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    parts = scratch + tile.to(tl.int64) * num_splits * (HEIGHT * WIDTH) + element
    tl.store(parts + tl.program_id(1) * (HEIGHT * WIDTH), total, mask=inside)
    # One thread counts for all: their stores come first.
    tl.debug_barrier()
    is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == num_splits - 1
    if is_last:
        total = tl.zeros_like(total)
        for split in range(num_splits):
            total += tl.load(parts + split * (HEIGHT * WIDTH), mask=inside, other=0, cache_modifier=".cg")
        tl.store(counters + tile, 0)
    return total, is_last


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes, and how."""

    rows: int
    columns: int
    inner: int
    """Input channels of one step of its loop."""
    num_warps: int
    num_stages: int
    """On NVIDIA's GPUs; AMD's hold one tile in shared memory and the next in registers."""

    def options(self, device: Device) -> dict[str, int]:
        """Of a launch."""
        return {"num_warps": self.num_warps, "num_stages": 2 if device.is_amd else self.num_stages}


@dataclass(frozen=True, slots=True)
class Grid:
    """A tile, and how often: ``num_tiles`` × ``num_splits`` programs."""

    tile: Tile
    num_tiles: int
    num_splits: int
    steps_per_split: int
    """Of the loop over input channels."""

    def scratch(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """For the partial sums of splits."""
        size = self.num_tiles * self.num_splits * self.tile.rows * self.tile.columns
        return torch.empty(size, dtype=dtype, device=device) if self.num_splits > 1 else None


def choose_grid(tiles: Sequence[Tile], num_rows: int, num_out: int, num_in: int, num_multiprocessors: int) -> Grid:
    """The first of ``tiles`` (large ones first) that gives each multiprocessor one; else the last of them, split.

    Tiles that would be half empty are left out, and so are those that would read the weight twice for few rows.
    """
    rows = max(16, triton.next_power_of_2(num_rows))
    for tile in tiles:
        if min(rows, 64) <= tile.rows <= rows:
            grid = undivided_grid(tile, num_rows, num_out, num_in)
            if grid.num_tiles >= num_multiprocessors:
                return grid
    return _divide(grid, num_in, 2 * num_multiprocessors // max(1, grid.num_tiles))


def undivided_grid(tile: Tile, num_rows: int, num_out: int, num_in: int) -> Grid:
    """Whatever the number of rows, each row is computed in the same way."""
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.columns)
    return Grid(tile, num_tiles, 1, triton.cdiv(num_in, tile.inner))


def _divide(grid: Grid, num_in: int, wanted: int) -> Grid:
    num_splits = max(1, min(wanted, num_in // SMALLEST_SPLIT))
    steps_per_split = triton.cdiv(grid.steps_per_split, num_splits)
    num_splits = triton.cdiv(grid.steps_per_split, steps_per_split)
    return replace(grid, num_splits=num_splits, steps_per_split=steps_per_split)
