"""Matrix products of a layer on GPUs: cuBLAS for plain weights, Triton for quantised ones.

A batch-invariant product computes a row in the same way whatever the number of rows, so that the result has the same
bits: one tile, no split. Sums in int32 are exact in any order, so those of int8 have nothing to give up for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from . import reference
from .quantized import Fp8Weight, Int4Weight, Int8Weight, Weight
from .triton_device import Device
from .triton_linear_int4 import FIXED_TILE, int4_gemm, pack, tiles_for
from .triton_linear_scaled import FIXED_TILES, TILES_OF_BYTES, gemm, quantize_rows
from .triton_linear_tiles import Grid, choose_grid, undivided_grid


def prepare_linear(
    weight: Weight, bias: Tensor | None = None, *, batch_invariant: bool = False, num_multiprocessors: int | None = None
) -> Callable[[Tensor], Tensor]:
    """See ``reference.prepare_linear``. Calls of one product must not overlap on two streams.

    ``batch_invariant``: a row's result has the same bits whatever the other rows are. ``num_multiprocessors`` stands
    for the device's own. Raises ValueError for fp8 where the device has no such products, and for groups of four bits
    that are neither whole rows nor multiples of 32.
    """
    if isinstance(weight, Tensor) and not batch_invariant:
        return reference.prepare_linear(weight, bias)
    device = Device.of(_device(weight))
    if num_multiprocessors is not None:
        device = replace(device, num_multiprocessors=num_multiprocessors)
    if isinstance(weight, Tensor):
        return PlainLinear(weight, bias, device)
    if isinstance(weight, Int4Weight):
        return Int4Linear(weight, bias, device, batch_invariant)
    return ScaledLinear(weight, bias, device, batch_invariant)


class PlainLinear:
    """Batch-invariant, which cuBLAS is not."""

    def __init__(self, weight: Tensor, bias: Tensor | None, device: Device) -> None:
        self._weight = weight.contiguous()
        self._bias = bias
        self._device = device

    def __call__(self, x: Tensor) -> Tensor:
        rows = _contiguous_rows(x.to(self._weight.dtype))
        grid = undivided_grid(FIXED_TILES[rows.element_size()], rows.shape[0], *self._weight.shape)
        return gemm(rows, self._weight, None, self._bias, x.dtype, grid, None, self._device)


class ScaledLinear:
    """int8 and fp8."""

    def __init__(
        self, weight: Int8Weight | Fp8Weight, bias: Tensor | None, device: Device, batch_invariant: bool
    ) -> None:
        if isinstance(weight, Fp8Weight) and weight.values.is_cuda:
            _check_fp8(weight.values.device)
        self._values = weight.values.contiguous()
        self._scales = weight.scales.contiguous()
        self._num_digits = weight.input_digits if isinstance(weight, Int8Weight) else 1
        self._bias = bias
        self._device = device
        self._is_fixed = batch_invariant and isinstance(weight, Fp8Weight)
        self._counters = _counters(weight.values, device)

    def __call__(self, x: Tensor) -> Tensor:
        values, scales = quantize_rows(_contiguous_rows(x), self._values.dtype, self._num_digits)
        if self._num_digits == 1:
            return self._product(values, scales, self._bias, x.dtype)
        first, second = self._product(values, scales, None, torch.float32).chunk(2)
        total = first + second
        return (total if self._bias is None else total + self._bias).to(x.dtype)

    def _product(self, values: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        both, grid = (scales, self._scales), self._grid(values.shape[0])
        return gemm(values, self._values, both, bias, dtype, grid, self._counters, self._device)

    def _grid(self, num_rows: int) -> Grid:
        if self._is_fixed:
            return undivided_grid(FIXED_TILES[1], num_rows, *self._values.shape)
        num_out, num_in = self._values.shape
        return choose_grid(TILES_OF_BYTES, num_rows, num_out, num_in, self._device.num_multiprocessors)


class Int4Linear:
    """Activations stay as they are."""

    def __init__(self, weight: Int4Weight, bias: Tensor | None, device: Device, batch_invariant: bool) -> None:
        self._weight = pack(weight)
        self._shape = (weight.packed.shape[0], 2 * weight.packed.shape[1])
        self._permutation = weight.permutation
        self._bias = bias
        self._device = device
        self._is_fixed = batch_invariant
        self._counters = _counters(weight.packed, device)

    def __call__(self, x: Tensor) -> Tensor:
        rows = _contiguous_rows(x) if self._permutation is None else x.index_select(1, self._permutation)
        return int4_gemm(rows, self._weight, self._bias, self._grid(x.shape[0]), self._counters, self._device)

    def _grid(self, num_rows: int) -> Grid:
        if self._is_fixed:
            return undivided_grid(FIXED_TILE, num_rows, *self._shape)
        return choose_grid(tiles_for(self._device), num_rows, *self._shape, self._device.num_multiprocessors)


def _device(weight: Weight) -> torch.device:
    if isinstance(weight, Tensor):
        return weight.device
    return weight.packed.device if isinstance(weight, Int4Weight) else weight.values.device


def _counters(weight: Tensor, device: Device) -> Tensor:
    """One for each tile of a product that is split, which has fewer than the device has multiprocessors."""
    return torch.zeros(device.num_multiprocessors, dtype=torch.int32, device=weight.device)


def _contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _check_fp8(device: torch.device) -> None:
    """AMD's gfx94x multiplies another fp8 than e4m3fn."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is None:
        multiplies = (properties.major, properties.minor) >= (8, 9)
    else:
        multiplies = properties.gcnArchName.startswith(("gfx95", "gfx12"))
    if not multiplies:
        raise ValueError(
            f"fp8 weights need a GPU of compute capability 8.9 or more, or AMD's gfx95x or gfx12xx; this is a "
            f"{properties.name}"
        )
