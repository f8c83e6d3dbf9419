"""The layers of a transformer, each sharded over the ranks and each with its own rule for loading its share.

A layer is made empty, ``parts()`` names the checkpoint's tensors that it wants, which slice of each and where it goes;
when all are loaded, ``prepare()`` packs the weight for the kernels, one layer at a time. They are plain callables:
inference needs nothing of ``nn.Module``, whose call overhead shows at one token a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.backend import Kernels
from ...kernels.quantized import Weight
from ..collectives import Collectives
from .matrices import Part, Share
from .parameters import Bias, NormWeight, Rows
from .products import Placement, prepare_product, stored_matrix


class Layer(Protocol):
    """What the loader asks of a layer."""

    def parts(self) -> Iterator[Part]:
        """The tensors that it wants. Allocates the weight that they are copied to."""
        ...

    def prepare(self, kernels: Kernels) -> None:
        """Called when all parts are loaded."""
        ...


class RMSNorm:
    """Root mean square norm with the residual added first; every rank holds the whole weight."""

    def __init__(self, name: str, size: int, eps: float, placement: Placement, offset: float = 0.0) -> None:
        """``offset``: added to the stored weight, which is then float32, as the norm is multiplied."""
        self._weight = NormWeight(name, size, range(size), placement, offset)
        self._eps = eps

    def parts(self) -> Iterator[Part]:
        yield from self._weight.parts()

    def prepare(self, kernels: Kernels) -> None:
        self._norm = kernels.rms_norm
        self._prepared = self._weight.prepared()

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(normed ``residual + x``, ``residual + x``), each ``[T, size]``."""
        return self._norm(x, self._prepared, self._eps, residual)


class ColumnParallelLinear:
    """``x [T, in] -> [T, out of this rank]``: each rank owns output columns, that is rows of the stored matrices.

    Several matrices are fused into one product (q, k, v; gate, up): their outputs follow each other.
    """

    def __init__(self, matrices: Sequence[Rows], in_features: int, placement: Placement) -> None:
        shares = [Share(m.name, (m.total, in_features), m.owned, range(in_features)) for m in matrices]
        self._matrices = [stored_matrix(share, placement) for share in shares]
        self._bias = Bias([m for m in matrices if m.has_bias], placement)
        self._placement = placement

    def parts(self) -> Iterator[Part]:
        for matrix in self._matrices:
            yield from matrix.parts()
        yield from self._bias.parts()

    def prepare(self, kernels: Kernels) -> None:
        weights = [matrix.weight() for matrix in self._matrices]
        self._product = prepare_product(weights, self._placement, kernels, bias=self._bias.prepared())

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)


class RowParallelLinear:
    """``x [T, in of this rank] -> [T, out]``: each rank owns input columns, the products are summed over the ranks."""

    def __init__(
        self,
        name: str,
        in_total: int,
        in_owned: range,
        out_features: int,
        placement: Placement,
        group: Collectives,
        *,
        has_outliers: bool = False,
        has_bias: bool = False,
    ) -> None:
        """``has_outliers``: of its input; see ``prepare_product``."""
        share = Share(name, (out_features, in_total), range(out_features), in_owned)
        self._has_outliers = has_outliers
        self._matrix = stored_matrix(share, placement)
        self._bias = Bias([Rows(name, out_features, range(out_features))] if has_bias else [], placement)
        self._placement = placement
        self._group = group

    def parts(self) -> Iterator[Part]:
        yield from self._matrix.parts()
        yield from self._bias.parts()

    def prepare(self, kernels: Kernels) -> None:
        bias = self._bias.prepared()
        self._product = prepare_product(
            [self._matrix.weight()],
            self._placement,
            kernels,
            has_outliers=self._has_outliers,
            bias=bias if self._group.rank == 0 else None,  # the sum has it once
        )
        self._between = kernels.between

    def __call__(self, x: Tensor) -> Tensor:
        product = self._product(x)
        return product if self._group.size == 1 else self._between(self._group.all_reduce, product)


class VocabParallelEmbedding:
    """Token ids ``[T] -> [T, hidden]``: each rank looks up the ids of its rows, the others give zeros to the sum."""

    def __init__(
        self, rows: Rows, hidden_size: int, placement: Placement, group: Collectives, scale: float = 1.0
    ) -> None:
        """``scale``: of what is looked up, rounded to the activations' dtype, as transformers does."""
        self._scale = float(torch.tensor(scale, dtype=placement.dtype))
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
        found = self._look_up(token_ids)
        return found if self._scale == 1.0 else found.mul_(self._scale)

    def _look_up(self, token_ids: Tensor) -> Tensor:
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
        *,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        """Logits times ``scale`` are what is given; then, with a ``soft_cap``, each x becomes cap * tanh(x / cap)."""
        self._scale = scale
        self._soft_cap = soft_cap
        share = Share(rows.name, (rows.total, hidden_size), rows.owned, range(hidden_size))
        self._matrix = stored_matrix(share, placement) if tied is None else None
        self._tied = tied
        self._widths = tuple(widths)
        self._placement = placement
        self._group = group

    def parts(self) -> Iterator[Part]:
        if self._matrix is not None:
            yield from self._matrix.parts()

    def prepare(self, kernels: Kernels) -> None:
        # Its input is one token's, so that twice the rows cost next to nothing.
        self._product = prepare_product([self._weight()], self._placement, kernels, has_outliers=True)

    def _weight(self) -> Weight:
        if self._matrix is not None:
            return self._matrix.weight()
        assert self._tied is not None
        return self._tied.weight.to(self._placement.matrix_dtype)

    def __call__(self, x: Tensor) -> Tensor | None:
        logits = self._group.gather_columns(self._product(x).float(), self._widths)
        return None if logits is None else self._bent(logits)

    def _bent(self, logits: Tensor) -> Tensor:
        if self._scale != 1.0:
            logits = logits * self._scale
        cap = self._soft_cap
        return logits if cap is None else (logits / cap).tanh_().mul_(cap)
