"""A mixture of experts on GPUs; see triton_experts_kernels.py.

Five launches and torch's sort, which is stable: an expert's tokens stay in order. A tile's height follows the tokens
that an expert has on average; batch-invariant, it is one, so that a token's sums are the same in any batch. No split
divides a sum: a few tokens of a model with many experts have a program for each expert and columns already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from .reference_experts import check_experts
from .triton_device import Device
from .triton_experts_kernels import combine_kernel, down_kernel, gate_up_kernel, route_kernel
from .triton_linear_tiles import Tile

COMBINE_BLOCK = 1024
TILES = {
    2: (
        Tile(rows=64, columns=64, inner=64, num_warps=8, num_stages=3),
        Tile(rows=32, columns=64, inner=64, num_warps=4, num_stages=4),
        Tile(rows=16, columns=64, inner=64, num_warps=4, num_stages=4),
    ),
    4: (
        Tile(rows=64, columns=64, inner=32, num_warps=8, num_stages=3),
        Tile(rows=16, columns=64, inner=32, num_warps=4, num_stages=3),
    ),
}
"""By the bytes of an element, large ones first. The first product has two sums for each element of its tile."""
FIXED_TILE = {size: tiles[-1] for size, tiles in TILES.items()}
"""Batch-invariant: the one that decoding is fast with."""


def choose_tile(tiles: Sequence[Tile], num_pairs: int, num_experts: int) -> Tile:
    """The largest that the experts' tokens would fill, were they shared out evenly; else the smallest."""
    return next((tile for tile in tiles if tile.rows * num_experts <= num_pairs), tiles[-1])


def most_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Each expert with pairs has at most one tile that is not full."""
    return num_pairs // rows + min(num_pairs, num_experts)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which pairs are whose."""

    weights: Tensor
    """float32 ``[T × k]``, by number."""
    order: Tensor
    """int64 ``[T × k]``: the pairs' numbers, by expert."""
    starts: Tensor
    """int32 ``[E + 1]``"""


class Experts:
    """See ``reference_experts.prepare_experts``."""

    def __init__(
        self, gate_up: Tensor, down: Tensor, *, num_chosen: int, renormalise: bool, batch_invariant: bool = False
    ) -> None:
        check_experts(gate_up, down, num_chosen)
        self._gate_up, self._down = gate_up.contiguous(), down.contiguous()
        self._num_experts = down.shape[0]
        self._num_chosen = num_chosen
        self._renormalise = renormalise
        self._is_fixed = batch_invariant
        self._bounds = torch.arange(self._num_experts + 1, dtype=torch.int32, device=down.device)

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        out = torch.empty((x.shape[0], self._down.shape[1]), dtype=x.dtype, device=x.device)
        if x.shape[0] > 0:
            self._fill(out, x.to(self._down.dtype), self._choose(logits))
        return out

    def _choose(self, logits: Tensor) -> _Choice:
        num_tokens, k = logits.shape[0], self._num_chosen
        experts = torch.empty(num_tokens * k, dtype=torch.int32, device=logits.device)
        weights = torch.empty(num_tokens * k, dtype=torch.float32, device=logits.device)
        route_kernel[(num_tokens,)](
            logits,
            experts,
            weights,
            logits.stride(0),
            NUM_EXPERTS=self._num_experts,
            EXPERTS_PADDED=triton.next_power_of_2(self._num_experts),
            NUM_CHOSEN=k,
            CHOSEN_PADDED=triton.next_power_of_2(k),
            RENORMALISE=self._renormalise,
        )
        ordered, order = experts.sort(stable=True)
        return _Choice(weights, order, torch.searchsorted(ordered, self._bounds, out_int32=True))

    def _fill(self, out: Tensor, x: Tensor, choice: _Choice) -> None:
        rows = x if x.stride(1) == 1 else x.contiguous()
        _, hidden, columns = self._down.shape
        num_pairs = choice.order.numel()
        tile = self._tile(num_pairs)
        inner = torch.empty((num_pairs, columns), dtype=rows.dtype, device=x.device)
        parts = torch.empty((num_pairs, hidden), dtype=rows.dtype, device=x.device)
        num_tiles = most_tiles(num_pairs, self._num_experts, tile.rows)
        shape = {
            "NUM_EXPERTS": self._num_experts,
            "EXPERTS_PADDED": triton.next_power_of_2(self._num_experts),
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "INNER": tile.inner,
            # See triton_linear_scaled.gemm.
            "UPCAST": triton.knobs.runtime.interpret and rows.dtype == torch.bfloat16,
            **tile.options(Device.of(x.device)),
        }
        gate_up_kernel[(num_tiles, triton.cdiv(columns, tile.columns))](
            rows,
            self._gate_up,
            choice.order,
            choice.starts,
            inner,
            columns,
            hidden,
            rows.stride(0),
            NUM_CHOSEN=self._num_chosen,
            **shape,
        )
        down_kernel[(num_tiles, triton.cdiv(hidden, tile.columns))](
            inner,
            self._down,
            choice.order,
            choice.starts,
            choice.weights,
            parts,
            hidden,
            columns,
            **shape,
        )
        combine_kernel[(x.shape[0], triton.cdiv(hidden, COMBINE_BLOCK))](
            parts, out, hidden, NUM_CHOSEN=self._num_chosen, BLOCK=COMBINE_BLOCK
        )

    def _tile(self, num_pairs: int) -> Tile:
        size = self._down.element_size()
        return FIXED_TILE[size] if self._is_fixed else choose_tile(TILES[size], num_pairs, self._num_experts)
