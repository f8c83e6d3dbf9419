"""The MLP of a transformer layer, or the mixture of experts in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from ...kernels.backend import Kernels
from .attention import matrices
from .config import Activation
from .experts import ExpertsLayer
from .layers import Layer
from .shard import Shard


class MLP:
    """SwiGLU or GEGLU (Shazeer 2020)."""

    def __init__(self, prefix: str, shard: Shard) -> None:
        config, columns = shard.config, shard.owned.mlp_columns
        total, has_bias = config.intermediate_size, config.biases.mlp
        self.gate_up = shard.column_parallel(
            matrices(
                prefix,
                ["gate_proj", "up_proj"],
                [total, total],
                [columns, columns],
                fused="gate_up_proj" if config.fused_projections else None,
                has_bias=has_bias,
            )
        )
        self.down = shard.row_parallel(
            f"{prefix}.down_proj.weight",
            total,
            columns,
            has_bias=has_bias,
            has_outliers=True,  # what the gate lets through is sparse (Sun et al. 2024, massive activations)
        )
        self._gate = _gate(config.activation, shard.kernels)

    def layers(self) -> Iterator[Layer]:
        yield from (self.gate_up, self.down)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._gate(self.gate_up(x)))


class Experts:
    """A mixture of them; see ``experts.py``."""

    def __init__(self, prefix: str, shard: Shard) -> None:
        """``prefix`` is the transformer layer's: families name the mixture within it differently."""
        config = shard.config
        assert config.experts is not None
        columns = shard.owned.expert_columns
        self.mixture = ExpertsLayer(prefix, config.experts, config.hidden_size, columns, shard.placement, shard.group)

    def layers(self) -> Iterator[Layer]:
        yield self.mixture

    def __call__(self, x: Tensor) -> Tensor:
        return self.mixture(x)


def _gate(activation: Activation, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    """``[T, 2 * I] -> [T, I]``: activation(gate) * up."""
    return {
        Activation.SILU: kernels.silu_mul,
        Activation.GELU_TANH: kernels.gelu_mul,
        Activation.GELU: kernels.gelu_erf_mul,
    }[activation]
