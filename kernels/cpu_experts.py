"""A mixture of experts on CPUs: each expert's tokens, side by side, times its weights, by the tiles of cpu_tiles.py.

A task is a panel of one expert and a block of its rows, so that a weight is read once for a block, weights of experts
without tokens never, and threads share the work evenly however uneven the experts' numbers of tokens are. Weights in
half precision stay so in memory; a stretch of a panel at a time is widened to float32 in a first-level cache, which
serves all rows of the block. All sums are float32, in one order: a token's result does not depend on the others.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from . import cpu_experts_routing as routing
from .cpu_elementwise import silu_mul_launch
from .cpu_experts_routing import ints
from .cpu_linear_float import PARALLEL_PRODUCTS, as_rows, to_panels
from .cpu_llvm import F16, F32, I16, I32, I64, constant, load, store, vector_of
from .cpu_numba import fingerprint
from .cpu_program import Launch, Team
from .cpu_team import compile_work, note_done, take, words
from .cpu_tiles import PANEL, PREFETCH_BYTES, TILE_ROWS, float_tile, rows_of_tile
from .reference_experts import check_experts

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_F32, _BF16 = 0, 1
WIDENED = 256
"""Input channels at once, of a panel in half precision: 32 KiB of float32 with AVX-512."""


@intrinsic
def _widen_bfloat16(typing_context: Any, at: Any, size: Any, out: Any) -> Any:
    """``out[i] = at[i]`` in float32, ``size`` times a whole panel's width; addresses."""

    def wide(builder: Any, bits: Any) -> Any:
        bits = builder.zext(bits, vector_of(I32, PANEL))
        return builder.bitcast(builder.shl(bits, constant(I32, PANEL, 16)), vector_of(F32, PANEL))

    return types.void(*[types.int64] * 3), functools.partial(_generate_widen, wide)


@intrinsic
def _widen_float16(typing_context: Any, at: Any, size: Any, out: Any) -> Any:
    def wide(builder: Any, bits: Any) -> Any:
        return builder.fpext(builder.bitcast(bits, vector_of(F16, PANEL)), vector_of(F32, PANEL))

    return types.void(*[types.int64] * 3), functools.partial(_generate_widen, wide)


def _generate_widen(wide: Any, context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
    at, size, out = arguments
    with cgutils.for_range(builder, size) as loop:
        bits = load(builder, builder.add(at, builder.mul(loop.index, I64(2 * PANEL))), vector_of(I16, PANEL))
        store(builder, wide(builder, bits), builder.add(out, builder.mul(loop.index, I64(4 * PANEL))))
    return context.get_dummy_value()


@functools.cache
def _product() -> Any:
    sources = fingerprint(__file__)

    def product(words_at, call_at, tally_at, member, team):
        _ = sources  # for the cache's key
        x_at, depth, panels_at, panels, kind, zeros_at, blocks_at, out_at = words(words_at, 8)
        tasks = np.int64(ints(blocks_at, 1)[0]) * panels
        out_stride, size = 4 * panels * PANEL, 4 if kind == _F32 else 2
        step = depth if kind == _F32 else min(depth, WIDENED)
        wide = np.empty((0 if kind == _F32 else step, PANEL), np.float32)
        task, _end = take(tally_at, tasks, 1)
        while task < tasks:
            block, panel = ints(blocks_at + 4 + 12 * (task // panels), 3), task % panels
            expert, begin, end = np.int64(block[0]), np.int64(block[1]), np.int64(block[2])
            tile_rows = rows_of_tile(end - begin, TILE_ROWS)
            for start in range(0, depth, step):
                channels = min(step, depth - start)
                stored_at = panels_at + size * ((expert * panels + panel) * depth + start) * PANEL
                weight_at = stored_at if kind == _F32 else wide.ctypes.data
                if kind == _BF16:
                    _widen_bfloat16(stored_at, channels, weight_at)
                elif kind != _F32:
                    _widen_float16(stored_at, channels, weight_at)
                for row in range(begin, end, tile_rows):
                    to = out_at + row * out_stride + 4 * panel * PANEL
                    float_tile(
                        min(tile_rows, end - row),
                        x_at + 4 * (row * depth + start),
                        4 * depth,
                        weight_at,
                        channels,
                        to if start else zeros_at,
                        out_stride if start else 0,
                        to,
                        out_stride,
                        stored_at + (PREFETCH_BYTES if kind == _F32 else channels * 2 * PANEL),
                        size * PANEL,
                    )
            note_done(tally_at, task, task + 1)
            task, _end = take(tally_at, tasks, 1)
        return tasks

    return compile_work(product, exact=True)


class _GroupedLinear:
    """Rows, sorted by expert, times their expert's ``weight[e] [out, in]``."""

    def __init__(self, weight: Tensor) -> None:
        num_experts, num_out, self._depth = weight.shape
        self.num_panels = -(-num_out // PANEL)
        self._kind = _KINDS[weight.dtype]
        self._panels = weight.new_empty(num_experts, self.num_panels, self._depth, PANEL)
        for panels, of_expert in zip(self._panels, weight.detach(), strict=True):
            panels.copy_(to_panels(of_expert, PANEL))
        self._zeros = torch.zeros(PANEL)
        self._address = _product().address

    @property
    def num_weights(self) -> int:
        """Of one expert."""
        return self._panels[0].numel()

    def launch(self, x: Tensor, blocks: Tensor, out: Tensor) -> Launch:
        """``x [rows, in]`` without gaps, ``out [rows, num_panels * PANEL]``."""
        weight_at = self._panels.data_ptr(), self.num_panels, self._kind, self._zeros.data_ptr()
        return Launch(self._address, (x.data_ptr(), self._depth, *weight_at, blocks.data_ptr(), out.data_ptr()))


class Experts:
    """See ``reference_experts.prepare_experts``; products are taken in float32. Compiles when it is made."""

    def __init__(self, team: Team, gate_up: Tensor, down: Tensor, *, num_chosen: int, renormalise: bool) -> None:
        check_experts(gate_up, down, num_chosen)
        self._team = team
        self._num_experts, self._hidden, self._columns = down.shape
        self._num_chosen = num_chosen
        self._renormalise = renormalise
        self._gate_up, self._down = _GroupedLinear(gate_up), _GroupedLinear(down)
        works = routing.route(), routing.sort(), routing.gather(), routing.combine()
        self._route, self._sort, self._gather, self._combine = (work.address for work in works)

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        team, k = self._team, self._num_chosen
        rows, scores = as_rows(team, x), as_rows(team, logits)
        num_pairs = rows.shape[0] * k
        chosen, order, place = (team.empty(num_pairs, dtype=torch.int32) for _ in range(3))
        counts = team.empty(self._num_experts, dtype=torch.int32)
        blocks = team.empty(routing.most_block_words(num_pairs, self._num_experts), dtype=torch.int32)
        weights = team.empty(num_pairs)
        sorted_rows, inner = team.empty(num_pairs, self._hidden), team.empty(num_pairs, self._columns)
        wide, given = (team.empty(num_pairs, part.num_panels * PANEL) for part in (self._gate_up, self._down))
        out = team.empty(rows.shape[0], self._hidden)
        pointers = [t.data_ptr() for t in (chosen, counts, order, place, blocks, weights)]
        chosen_at, counts_at, order_at, place_at, blocks_at, weights_at = pointers
        of_logits = scores.data_ptr(), scores.stride(0), self._num_experts
        sizes = blocks_at, blocks.numel()
        launches = [
            Launch(self._route, (*of_logits, k, self._renormalise, chosen_at, weights_at)),
            Launch(self._sort, (chosen_at, k, counts_at, self._num_experts, order_at, place_at, *sizes)),
            Launch(
                self._gather,
                (rows.data_ptr(), 4 * rows.stride(0), self._hidden, k, order_at, sorted_rows.data_ptr()),
            ),
            self._gate_up.launch(sorted_rows, blocks, wide),
            silu_mul_launch(wide, inner, k),
            self._down.launch(inner, blocks, given),
            Launch(
                self._combine,
                (given.data_ptr(), given.stride(0), place_at, weights_at, k, out.data_ptr(), self._hidden),
            ),
        ]
        products = num_pairs * (self._gate_up.num_weights + self._down.num_weights)
        team.run(launches, rows.shape[0], is_small=products < PARALLEL_PRODUCTS)
        return self._in_dtype_of(x, out)

    def _in_dtype_of(self, x: Tensor, out: Tensor) -> Tensor:
        return out if x.dtype == torch.float32 else out.to(x.dtype)
