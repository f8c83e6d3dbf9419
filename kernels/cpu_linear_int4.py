"""Matrix products by 4-bit weights on CPUs: half a byte is read for each weight, and all is computed in float32.

A panel of one group of input channels at a time is widened to float32, in a first-level cache, and passed over the
rows by a tile of cpu_tiles.py. Widening it once serves all rows of a block.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .cpu_columns import Finish
from .cpu_linear_float import PARALLEL_PRODUCTS, as_rows, bias_of, to_panels
from .cpu_numba import fingerprint
from .cpu_program import Launch, Team
from .cpu_team import compile_work, note_done, share_of, take, words
from .cpu_tiles import PANEL, TILE_ROWS, float_tile, place_of_task, rows_of_block, widen_int4
from .quantized import Int4Weight


@functools.cache
def _product() -> Any:
    sources = fingerprint(__file__)

    def product(words_at, call_at, tally_at, member, team):
        """A task is a panel and a block of rows; a group is ``size`` input channels."""
        _ = sources  # for the cache's key
        x_at, x_stride, codes_at, scales_at, minimums_at, groups, size, panels, bias_at, out_at = words(words_at, 10)
        (rows,) = words(call_at, 1)
        block_rows = rows_of_block(rows, TILE_ROWS, panels, team)
        tasks = -(-rows // block_rows) * panels
        out_stride = 4 * panels * PANEL
        first, last = take(tally_at, tasks, share_of(tasks, team))
        if first >= last:
            return tasks
        wide = np.empty((size, PANEL), np.float32)
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
                            codes_at + (place + 1) * (size // 2) * PANEL,
                            PANEL // 2,
                        )
            note_done(tally_at, first, last)
            first, last = take(tally_at, tasks, share_of(tasks, team))
        return tasks

    return compile_work(product, exact=True)


class Int4Linear:
    """``x [T, in] -> [T, out]``, see ``reference.prepare_linear``. A row's product does not depend on other rows."""

    def __init__(self, team: Team, weight: Int4Weight, bias: Tensor | None = None) -> None:
        self._team = team
        self._finish = Finish(team, weight.packed.shape[0])
        self._codes = to_panels(weight.packed, PANEL)
        self._scales = to_panels(weight.scales.float(), PANEL)
        self._minimums = to_panels(weight.minimums.float(), PANEL)
        self._permutation = weight.permutation
        self._bias = bias_of(weight.packed.shape[0], bias, PANEL)
        self._num_panels = self._codes.shape[0]
        tensors = self._codes, self._scales, self._minimums
        groups = weight.scales.shape[1], weight.group_size, self._num_panels
        self._weight_at = *(tensor.data_ptr() for tensor in tensors), *groups, self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        rows = self._permuted(as_rows(self._team, x))
        num_rows = rows.shape[0]
        out = self._team.empty(num_rows, self._num_panels * PANEL)
        at = rows.data_ptr(), 4 * rows.stride(0), *self._weight_at, out.data_ptr()
        is_small = 2 * num_rows * self._codes.numel() < PARALLEL_PRODUCTS
        self._team.run([Launch(_product().address, at)], num_rows, is_small=is_small)
        return self._finish(out, x)

    def _permuted(self, x: Tensor) -> Tensor:
        permutation = self._permutation
        if permutation is None:
            return x
        out = self._team.empty(*x.shape)

        def permute(rows: int, x: Tensor, out: Tensor) -> None:
            torch.index_select(x[:rows], 1, permutation, out=out[:rows])

        self._team.call(permute, x.shape[0], x, out)
        return out
