"""From the matrices of a checkpoint to the products that a layer calls: quantised, fused, packed for the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.backend import Kernels
from ...kernels.quantized import Int4Weight, Weight, quantize_fp8, quantize_int8
from ..spec import Quantization
from .matrices import PlainMatrix, Share, StoredMatrix
from .packed_checkpoint import packed_matrix
from .packing import Packing


@dataclass(frozen=True, slots=True)
class Placement:
    """What weights are made of and where they live."""

    device: torch.device
    dtype: torch.dtype
    """Of activations, norms, the embedding and, unless it is quantised, the KV cache."""
    matrix_dtype: torch.dtype
    """Of the weights of matrix products, as they are read."""
    quantization: Quantization | None = None
    packing: Packing | None = None
    """How the checkpoint packs its matrices."""

    @classmethod
    def on(
        cls,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None = None,
        packing: Packing | None = None,
    ) -> Placement:
        """Half precision on a CPU is for the matrices alone: there it saves the time, and all else has float32
        kernels. What will be quantised is read whole, so that it is rounded once."""
        activations = torch.float32 if device.type == "cpu" else dtype
        return cls(device, activations, torch.float32 if quantization else dtype, quantization, packing)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def describe_weights(self) -> str:
        """For people: how the matrices are kept, where it is not by ``matrix_dtype``."""
        return self.quantization or (self.packing.describe() if self.packing else "")


def stored_matrix(share: Share, placement: Placement) -> StoredMatrix:
    """The slice in the form that the checkpoint has, by its config.json."""
    packing = placement.packing
    if packing is None or not packing.covers(share.name):
        return PlainMatrix(share, placement.device, placement.matrix_dtype)
    return packed_matrix(share, packing, placement.device)


def prepare_product(
    weights: Sequence[Weight],
    placement: Placement,
    kernels: Kernels,
    *,
    has_outliers: bool = False,
    bias: Tensor | None = None,
) -> Callable[[Tensor], Tensor]:
    """``x [T, in] -> [T, out]`` of several matrices, whose outputs follow each other; one product where they fuse.

    ``bias``: ``[out]``, in ``matrix_dtype``. ``has_outliers``: single inputs of a token are many times as large as the
    others, and eight bits are too few to hold both.
    """
    digits = 2 if has_outliers else 1
    joined = fused(weights)
    widths = [_num_outputs(weight) for weight in joined]
    biases = [None] * len(joined) if bias is None else torch.split(bias, widths)
    products = [
        kernels.prepare_linear(quantized(weight, placement.quantization, digits), share)
        for weight, share in zip(joined, biases, strict=True)
    ]
    return products[0] if len(products) == 1 else ProductsInTurn(products, kernels)


def _num_outputs(weight: Weight) -> int:
    values = (
        weight if isinstance(weight, Tensor) else weight.packed if isinstance(weight, Int4Weight) else weight.values
    )
    return values.shape[0]


class ProductsInTurn:
    """``x [T, in] -> [T, out]`` of matrices that could not be fused, because they are stored in different forms."""

    def __init__(self, products: Sequence[Callable[[Tensor], Tensor]], kernels: Kernels) -> None:
        self._products = tuple(products)
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.join_columns([product(x) for product in self._products])


def quantized(weight: Weight, quantization: Quantization | None, input_digits: int = 1) -> Weight:
    """A plain weight, rounded; one that the checkpoint packs as it is."""
    if quantization is None or not isinstance(weight, Tensor):
        return weight
    return quantize_int8(weight, input_digits=input_digits) if quantization == "int8" else quantize_fp8(weight)


def weight_forms(placement: Placement) -> list[Callable[[Tensor], Weight]]:
    """What makes of a plain weight, whose inputs are a multiple of 128, each form that a model's products may have."""

    def plain(weight: Tensor) -> Weight:
        return quantized(weight.to(placement.matrix_dtype), placement.quantization)

    return [plain] if placement.packing is None else [plain, _zeros_in_int4]


def _zeros_in_int4(weight: Tensor) -> Int4Weight:
    num_out, num_in = weight.shape
    scales, minimums = weight.new_zeros(2, num_out, num_in // 128)
    return Int4Weight(torch.zeros(num_out, num_in // 2, dtype=torch.uint8), scales, minimums)


def fused(weights: Sequence[Weight]) -> list[Weight]:
    """The weights, with those that follow each other and have one form joined along ``out``."""
    runs: list[list[Weight]] = []
    for weight in weights:
        if runs and _are_alike(runs[-1][-1], weight):
            runs[-1].append(weight)
        else:
            runs.append([weight])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _are_alike(one: Weight, other: Weight) -> bool:
    if not isinstance(one, Int4Weight) or not isinstance(other, Int4Weight):
        return isinstance(one, Tensor) and isinstance(other, Tensor)
    if one.permutation is None or other.permutation is None:
        return one.permutation is other.permutation
    return torch.equal(one.permutation, other.permutation)


def _joined(run: list[Weight]) -> Weight:
    plain = [weight for weight in run if isinstance(weight, Tensor)]
    if plain:
        return torch.cat(plain)
    packed = [weight for weight in run if isinstance(weight, Int4Weight)]
    return Int4Weight(
        torch.cat([weight.packed for weight in packed]),
        torch.cat([weight.scales for weight in packed]),
        torch.cat([weight.minimums for weight in packed]),
        packed[0].permutation,
    )
