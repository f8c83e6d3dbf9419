"""A rank's slice of a matrix, in the form that the checkpoint has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.quantized import Weight


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the checkpoint, and where this rank's slice of it goes."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor in the checkpoint."""
    slices: tuple[slice, ...]
    """This rank's share, one slice for each dimension."""
    target: Tensor
    """Filled with the share; a view of the layer's weight."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank owns of a matrix ``[out, in]``."""

    name: str
    """In the checkpoint, if the matrix is stored as usual."""
    shape: tuple[int, int]
    rows: range
    columns: range


class StoredMatrix(Protocol):
    """A rank's slice of a matrix, in the form that the checkpoint has."""

    def parts(self) -> Iterator[Part]:
        """The tensors that it wants. Allocates what they are copied to."""
        ...

    def weight(self) -> Weight:
        """Called once, when all parts are loaded. Keeps nothing."""
        ...


class PlainMatrix:
    """Stored as one tensor ``[out, in]`` of numbers."""

    def __init__(self, share: Share, device: torch.device, dtype: torch.dtype) -> None:
        self._share = share
        self._device = device
        self._dtype = dtype

    def parts(self) -> Iterator[Part]:
        share = self._share
        self._weight = torch.empty(len(share.rows), len(share.columns), device=self._device, dtype=self._dtype)
        yield Part(share.name, share.shape, (span(share.rows), span(share.columns)), self._weight)

    def weight(self) -> Weight:
        weight = self._weight
        del self._weight
        return weight


def span(run: range) -> slice:
    return slice(run.start, run.stop)
