"""One transformer layer: attention and MLP, each with its norms and the residual around it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ...kernels.kv_cache import KVCache
from .attention import Attention
from .batch import Batch
from .config import NormPlacement
from .layers import Layer
from .mlp import MLP, Experts
from .shard import Shard


class Block:
    """What it gives is a pair whose sum is the next hidden states: the next norm adds them up in its pass."""

    def __init__(self, layer: int, shard: Shard) -> None:
        prefix = f"model.layers.{layer}"
        before, after = _norm_names(shard.config.norms)
        self._norms_before = [shard.norm(f"{prefix}.{name}.weight") for name in before]
        self._norms_after = [shard.norm(f"{prefix}.{name}.weight") for name in after]
        self.attention = Attention(f"{prefix}.self_attn", layer, shard)
        has_experts = shard.config.has_experts(layer)
        self.mlp = Experts(prefix, shard) if has_experts else MLP(f"{prefix}.mlp", shard)
        self._kernels = shard.kernels

    def layers(self) -> Iterator[Layer]:
        """In the order of the computation."""
        for index, part in enumerate((self.attention, self.mlp)):
            yield from self._norms_before[index : index + 1]
            yield from part.layers()
            yield from self._norms_after[index : index + 1]

    def __call__(
        self, x: Tensor, residual: Tensor | None, cache: KVCache, cos_sin: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        x, residual = self._before(0, x, residual)
        x = self._after(0, self.attention(x, cache, cos_sin, batch))
        x, residual = self._before(1, x, residual)
        return self._after(1, self.mlp(x)), residual

    def _before(self, index: int, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """What goes into attention (0) or the MLP (1), and the residual around it."""
        if self._norms_before:
            return self._norms_before[index](x, residual)
        total = x if residual is None else self._kernels.add(residual, x)
        return total, total

    def _after(self, index: int, x: Tensor) -> Tensor:
        return self._norms_after[index](x, None)[0] if self._norms_after else x


def _norm_names(norms: NormPlacement) -> tuple[list[str], list[str]]:
    """Of attention's and the MLP's norms, before and after, in the checkpoint. Llama's name for the norm before the MLP
    is where it lies, after attention; Gemma and OLMo 2 have one there that norms what attention gives."""
    after = ["post_attention_layernorm", "post_feedforward_layernorm"]
    return {
        NormPlacement.BEFORE: (["input_layernorm", "post_attention_layernorm"], []),
        NormPlacement.AFTER: ([], after),
        NormPlacement.AROUND: (["input_layernorm", "pre_feedforward_layernorm"], after),
    }[norms]
