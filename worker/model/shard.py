"""Shard: which part of a model a rank has, and what it is made with."""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.backend import Kernels
from ..collectives import Collectives
from .config import ModelConfig
from .layers import ColumnParallelLinear, RMSNorm, RowParallelLinear
from .parameters import Rows
from .partition import Partition
from .products import Placement


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of a model. It makes the layers that follow from the model's description."""

    config: ModelConfig
    shares: tuple[Partition, ...]
    """Of all ranks."""
    placement: Placement
    group: Collectives
    kernels: Kernels

    @property
    def owned(self) -> Partition:
        """This rank's."""
        return self.shares[self.group.rank]

    def norm(self, name: str) -> RMSNorm:
        """Of hidden states."""
        config = self.config
        return RMSNorm(name, config.hidden_size, config.rms_norm_eps, self.placement, config.norm_offset)

    def column_parallel(self, matrices: list[Rows]) -> ColumnParallelLinear:
        """Of hidden states."""
        return ColumnParallelLinear(matrices, self.config.hidden_size, self.placement)

    def row_parallel(
        self, name: str, in_total: int, in_owned: range, *, has_bias: bool, has_outliers: bool = False
    ) -> RowParallelLinear:
        """Giving hidden states."""
        return RowParallelLinear(
            name,
            in_total,
            in_owned,
            self.config.hidden_size,
            self.placement,
            self.group,
            has_bias=has_bias,
            has_outliers=has_outliers,
        )
