"""A mixture of experts in a transformer layer, sharded over the ranks by the columns of every expert.

Each rank owns the same run of every expert's inner columns, as it does of a plain MLP's. Were whole experts dealt out
instead, a step would take as long as the rank whose experts the batch happens to choose, since all meet in the sum that
follows; and with few tokens most ranks would have nothing to do. This way each reads and multiplies the same whatever
is chosen, no token travels between ranks, and the sum is the one that a plain MLP needs too.

The router is whole on every rank and never rounded: it costs next to nothing, and a rounded one chooses other experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels.backend import Kernels
from ..collectives import Collectives
from ..errors import ConfigurationError
from .config import ExpertsConfig
from .matrices import Part, span
from .products import Placement


class ExpertsLayer:
    """``x [T, hidden] -> [T, hidden]``: a sum of SwiGLU experts, chosen for each token (Shazeer et al. 2017; Jiang et
    al. 2024)."""

    def __init__(
        self,
        prefix: str,
        experts: ExpertsConfig,
        hidden_size: int,
        columns: range,
        placement: Placement,
        group: Collectives,
    ) -> None:
        """``prefix`` is the transformer layer's; ``columns`` are this rank's of every expert. Raises
        ConfigurationError for weights in fewer bits."""
        self._prefix = f"{prefix}.{experts.names.block}"
        self._config = experts
        self._hidden_size = hidden_size
        self._columns = columns
        self._placement = placement
        self._group = group
        self._refuse_fewer_bits()

    def parts(self) -> Iterator[Part]:
        width, whole = len(self._columns), (self._config.num_experts, self._hidden_size)
        self._router_weight = self._placement.empty(*whole)
        self._gate_up = self._empty(2 * width, self._hidden_size)
        self._down = self._empty(self._hidden_size, width)
        yield Part(f"{self._prefix}.gate.weight", whole, (slice(None), slice(None)), self._router_weight)
        for expert in range(self._config.num_experts):
            yield from self._parts_of(expert)

    def _parts_of(self, expert: int) -> Iterator[Part]:
        names, owned = self._config.names, span(self._columns)
        rows, halves = (self._config.intermediate_size, self._hidden_size), self._gate_up[expert].chunk(2)
        for name, target in zip((names.gate, names.up), halves, strict=True):
            yield Part(self._matrix(expert, name), rows, (owned, slice(None)), target)
        yield Part(self._matrix(expert, names.down), rows[::-1], (slice(None), owned), self._down[expert])

    def _empty(self, num_out: int, num_in: int) -> Tensor:
        """A matrix for each expert."""
        of_what = self._placement
        return torch.empty(self._config.num_experts, num_out, num_in, device=of_what.device, dtype=of_what.matrix_dtype)

    def _matrix(self, expert: int, name: str) -> str:
        return f"{self._prefix}.experts.{expert}.{name}.weight"

    def prepare(self, kernels: Kernels) -> None:
        self._route = kernels.prepare_linear(self._router_weight)
        self._experts = kernels.prepare_experts(
            self._gate_up, self._down, num_chosen=self._config.num_chosen, renormalise=self._config.renormalise
        )
        self._between = kernels.between
        del self._router_weight, self._gate_up, self._down

    def __call__(self, x: Tensor) -> Tensor:
        given = self._experts(x, self._route(x))
        return given if self._group.size == 1 else self._between(self._group.all_reduce, given)

    def _refuse_fewer_bits(self) -> None:
        if self._placement.quantization is not None:
            raise ConfigurationError(
                f"--quantization is {self._placement.quantization}, but {self._prefix} is a mixture of experts, whose "
                "weights can be float32, bfloat16 or float16 only"
            )
        packing = self._placement.packing
        if packing is not None and packing.covers(self._matrix(0, self._config.names.gate)):
            raise ConfigurationError(
                f"the checkpoint packs its matrices ({packing.describe()}), but {self._prefix} is a mixture of "
                "experts, whose weights can be float32, bfloat16 or float16 only"
            )
