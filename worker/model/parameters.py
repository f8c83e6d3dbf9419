"""The small parameters of layers: norms' weights and biases of products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .matrices import Part, span
from .products import Placement


@dataclass(frozen=True, slots=True)
class Rows:
    """A run of output rows of a matrix in the checkpoint: ``name`` has ``total`` rows, this rank owns ``owned``."""

    name: str
    """Of its weight."""
    total: int
    owned: range
    has_bias: bool = False


class NormWeight:
    """What a norm multiplies by: ``[owned]`` of ``[size]``."""

    def __init__(self, name: str, size: int, owned: range, placement: Placement, offset: float) -> None:
        """``offset`` is added to what is stored: in float32, in which the product is then taken."""
        self._name = name
        self._size = size
        self._owned = owned
        self._placement = placement
        self._offset = offset

    def parts(self) -> Iterator[Part]:
        self._stored = self._placement.empty(len(self._owned))
        yield Part(self._name, (self._size,), (span(self._owned),), self._stored)

    def prepared(self) -> Tensor:
        """Called once, when its part is loaded. Keeps nothing."""
        stored = self._stored
        del self._stored
        return stored.float() + self._offset if self._offset else stored


class Bias:
    """Of products that are fused: their biases one after the other, in the matrices' dtype."""

    def __init__(self, products: Sequence[Rows], placement: Placement) -> None:
        """``products``: those with a bias; all or none of those that are fused."""
        self._products = products
        self._placement = placement

    def parts(self) -> Iterator[Part]:
        widths = [len(rows.owned) for rows in self._products]
        self._whole = torch.empty(sum(widths), device=self._placement.device, dtype=self._placement.matrix_dtype)
        for rows, target in zip(self._products, torch.split(self._whole, widths), strict=True):
            yield Part(_bias_name(rows.name), (rows.total,), (span(rows.owned),), target)

    def prepared(self) -> Tensor | None:
        """Called once, when its parts are loaded; None without any. Keeps nothing."""
        whole = self._whole
        del self._whole
        return whole if self._products else None


def _bias_name(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
