"""The layers of a transformer, each sharded over the ranks and each with its own rule for loading its share.

A layer is made empty, ``parts()`` names the checkpoint's tensors that it wants, which slice of each and where it goes;
when all are loaded, ``prepare()`` packs the weight for the kernels. They are plain callables: inference needs nothing
of ``nn.Module``, whose call overhead shows at one token a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.backend import Kernels
from ..collectives import Collectives


@dataclass(frozen=True, slots=True)
class Placement:
    """What weights are made of and where they live."""

    device: torch.device
    dtype: torch.dtype
    """Of activations, norms, the embedding and the KV cache."""
    matrix_dtype: torch.dtype
    """Of the weights of matrix products."""

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype) -> Placement:
        """Half precision on a CPU is for the matrices alone: there it saves the time, and all else has float32
        kernels."""
        return cls(device, torch.float32 if device.type == "cpu" else dtype, dtype)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def matrix(self, *shape: int) -> Tensor:
        """An empty weight of a matrix product."""
        return torch.empty(shape, device=self.device, dtype=self.matrix_dtype)


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


class Layer(Protocol):
    """What the loader asks of a layer."""

    def parts(self) -> Iterator[Part]:
        """The tensors that it wants. Allocates the weight that they are copied to."""
        ...

    def prepare(self, kernels: Kernels) -> None:
        """Called when all parts are loaded."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """A run of output rows of a matrix in the checkpoint: ``name`` has ``total`` rows, this rank owns ``owned``."""

    name: str
    total: int
    owned: range


class RMSNorm:
    """Root mean square norm with the residual added first; every rank holds the whole weight."""

    def __init__(self, name: str, size: int, eps: float, placement: Placement) -> None:
        self._name = name
        self._size = size
        self._eps = eps
        self._placement = placement

    def parts(self) -> Iterator[Part]:
        self._weight = self._placement.empty(self._size)
        yield Part(self._name, (self._size,), (slice(None),), self._weight)

    def prepare(self, kernels: Kernels) -> None:
        self._norm = kernels.rms_norm

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(normed ``residual + x``, ``residual + x``), each ``[T, size]``."""
        return self._norm(x, self._weight, self._eps, residual)


class ColumnParallelLinear:
    """``x [T, in] -> [T, out of this rank]``: each rank owns output columns, that is rows of the stored matrices.

    Several matrices are fused into one product (q, k, v; gate, up): their outputs follow each other.
    """

    def __init__(self, matrices: Sequence[Rows], in_features: int, placement: Placement) -> None:
        self._matrices = tuple(matrices)
        self._in = in_features
        self._placement = placement

    def parts(self) -> Iterator[Part]:
        self._weight = self._placement.matrix(sum(len(m.owned) for m in self._matrices), self._in)
        targets = torch.split(self._weight, [len(matrix.owned) for matrix in self._matrices])
        for matrix, target in zip(self._matrices, targets, strict=True):
            rows = slice(matrix.owned.start, matrix.owned.stop)
            yield Part(matrix.name, (matrix.total, self._in), (rows, slice(None)), target)

    def prepare(self, kernels: Kernels) -> None:
        self._product = kernels.prepare_linear(self._weight)
        del self._weight

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)


class RowParallelLinear:
    """``x [T, in of this rank] -> [T, out]``: each rank owns input columns, the products are summed over the ranks."""

    def __init__(
        self, name: str, in_total: int, in_owned: range, out_features: int, placement: Placement, group: Collectives
    ) -> None:
        self._name = name
        self._shape = (out_features, in_total)
        self._owned = in_owned
        self._placement = placement
        self._group = group

    def parts(self) -> Iterator[Part]:
        self._weight = self._placement.matrix(self._shape[0], len(self._owned))
        columns = slice(self._owned.start, self._owned.stop)
        yield Part(self._name, self._shape, (slice(None), columns), self._weight)

    def prepare(self, kernels: Kernels) -> None:
        self._product = kernels.prepare_linear(self._weight)
        del self._weight

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self._product(x))


class VocabParallelEmbedding:
    """Token ids ``[T] -> [T, hidden]``: each rank looks up the ids of its rows, the others give zeros to the sum."""

    def __init__(self, rows: Rows, hidden_size: int, placement: Placement, group: Collectives) -> None:
        self._rows = rows
        self._hidden = hidden_size
        self._placement = placement
        self._group = group

    def parts(self) -> Iterator[Part]:
        owned = self._rows.owned
        self.weight = self._placement.empty(len(owned), self._hidden)
        shape = (self._rows.total, self._hidden)
        yield Part(self._rows.name, shape, (slice(owned.start, owned.stop), slice(None)), self.weight)

    def prepare(self, kernels: Kernels) -> None:
        pass

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self._rows.owned.start
        foreign = (local < 0) | (local >= len(self._rows.owned))
        found = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self._group.all_reduce(found.masked_fill_(foreign[:, None], 0))


class ParallelHead:
    """``x [R, hidden] -> logits [R, vocabulary]``, float32, on rank 0; None on the others.

    Each rank owns rows of the vocabulary. ``tied`` takes over the embedding's weight instead of a tensor of its own.
    """

    def __init__(
        self,
        rows: Rows,
        widths: Sequence[int],
        hidden_size: int,
        placement: Placement,
        group: Collectives,
        tied: VocabParallelEmbedding | None,
    ) -> None:
        self._rows = rows
        self._widths = tuple(widths)
        self._hidden = hidden_size
        self._placement = placement
        self._group = group
        self._tied = tied

    def parts(self) -> Iterator[Part]:
        if self._tied is None:
            owned = self._rows.owned
            self._weight = self._placement.matrix(len(owned), self._hidden)
            shape = (self._rows.total, self._hidden)
            yield Part(self._rows.name, shape, (slice(owned.start, owned.stop), slice(None)), self._weight)

    def prepare(self, kernels: Kernels) -> None:
        if self._tied is not None:
            self._weight = self._tied.weight.to(self._placement.matrix_dtype)
        self._product = kernels.prepare_linear(self._weight)
        del self._weight

    def __call__(self, x: Tensor) -> Tensor | None:
        return self._group.gather_columns(self._product(x).float(), self._widths)
