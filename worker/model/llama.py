"""Llama (Touvron et al. 2023) over paged KV: the whole transformer on one page, without a word about ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from ...kernels.backend import Kernels
from ...kernels.kv_cache import KVCache
from ..collectives import Collectives
from .config import Activation, ModelConfig
from .layers import (
    ColumnParallelLinear,
    Layer,
    ParallelHead,
    RMSNorm,
    RowParallelLinear,
    Rows,
    VocabParallelEmbedding,
)
from .partition import Partition
from .products import Placement
from .rotary import rotary_table


@dataclass(frozen=True, slots=True)
class Batch:
    """A ragged batch of S sequences with T new tokens, on the model's device; all integers int32."""

    token_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    slot_mapping: Tensor
    """[T] where each token's K and V go: block * block_size + offset."""
    block_tables: Tensor
    """[S, max_blocks]"""
    seq_lens: Tensor
    """[S] tokens before this step plus new ones."""
    query_start_loc: Tensor
    """[S + 1]"""
    max_query_len: int
    max_seq_len: int


class Attention:
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions against the paged cache, all of it or within
    a sliding window (Beltagy et al. 2020)."""

    def __init__(
        self,
        prefix: str,
        config: ModelConfig,
        owned: Partition,
        placement: Placement,
        group: Collectives,
        kernels: Kernels,
    ) -> None:
        dim = config.head_dim
        query = Rows(f"{prefix}.q_proj.weight", config.num_query_heads * dim, _scaled(owned.query_heads, dim))
        key = Rows(f"{prefix}.k_proj.weight", config.num_kv_heads * dim, _scaled(owned.kv_heads, dim))
        value = Rows(f"{prefix}.v_proj.weight", config.num_kv_heads * dim, _scaled(owned.kv_heads, dim))
        self.qkv = ColumnParallelLinear([query, key, value], config.hidden_size, placement)
        self.out = RowParallelLinear(
            f"{prefix}.o_proj.weight", query.total, query.owned, config.hidden_size, placement, group
        )
        self._kernels = kernels
        self._heads = [len(owned.query_heads), len(owned.kv_heads), len(owned.kv_heads)]
        self._num_heads = sum(self._heads)
        self._head_dim = dim
        self._scale = 1 / math.sqrt(dim)
        self._window = config.sliding_window

    def __call__(self, x: Tensor, cache: KVCache, cos_sin: Tensor, batch: Batch) -> Tensor:
        """``x [T, hidden] -> [T, hidden]``; writes K and V of the T tokens to ``cache``."""
        kernels = self._kernels
        heads = self.qkv(x).view(-1, self._num_heads, self._head_dim)
        query, key, value = heads.split_with_sizes(self._heads, dim=1)
        query, key = kernels.rotary(query, key, batch.positions, cos_sin)
        kernels.write_kv(key, value, cache, batch.slot_mapping)
        attended = kernels.paged_attention(
            query,
            cache,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start_loc,
            scale=self._scale,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            sliding_window=self._window,
        )
        return self.out(attended.flatten(1))


class MLP:
    """SwiGLU or GEGLU (Shazeer 2020)."""

    def __init__(
        self,
        prefix: str,
        config: ModelConfig,
        owned: Partition,
        placement: Placement,
        group: Collectives,
        kernels: Kernels,
    ) -> None:
        columns, total = owned.mlp_columns, config.intermediate_size
        matrices = [Rows(f"{prefix}.{name}.weight", total, columns) for name in ("gate_proj", "up_proj")]
        self.gate_up = ColumnParallelLinear(matrices, config.hidden_size, placement)
        self.down = RowParallelLinear(
            f"{prefix}.down_proj.weight",
            total,
            columns,
            config.hidden_size,
            placement,
            group,
            has_outliers=True,  # what the gate lets through is sparse (Sun et al. 2024, massive activations)
        )
        self._gate = _gate(config.activation, kernels)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._gate(self.gate_up(x)))


class Block:
    """One transformer layer: attention and MLP, each behind a norm that also adds up the residual."""

    def __init__(
        self,
        prefix: str,
        config: ModelConfig,
        owned: Partition,
        placement: Placement,
        group: Collectives,
        kernels: Kernels,
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(f"{prefix}.input_layernorm.weight", size, eps, placement)
        self.attention = Attention(f"{prefix}.self_attn", config, owned, placement, group, kernels)
        self.mlp_norm = RMSNorm(f"{prefix}.post_attention_layernorm.weight", size, eps, placement)
        self.mlp = MLP(f"{prefix}.mlp", config, owned, placement, group, kernels)

    def layers(self) -> Iterator[Layer]:
        yield from (self.input_norm, self.attention.qkv, self.attention.out)
        yield from (self.mlp_norm, self.mlp.gate_up, self.mlp.down)

    def __call__(
        self, x: Tensor, residual: Tensor | None, cache: KVCache, cos_sin: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_norm(x, residual)
        x = self.attention(x, cache, cos_sin, batch)
        x, residual = self.mlp_norm(x, residual)
        return self.mlp(x), residual


class Llama:
    """A Llama-type language model, this rank's share of it."""

    def __init__(
        self,
        config: ModelConfig,
        shares: tuple[Partition, ...],
        placement: Placement,
        group: Collectives,
        kernels: Kernels,
        max_positions: int,
    ) -> None:
        owned = shares[group.rank]
        table = "model.embed_tokens.weight"
        self.hidden_size = config.hidden_size
        self.embedding = VocabParallelEmbedding(
            Rows(table, config.vocab_size, owned.vocabulary), config.hidden_size, placement, group
        )
        self.blocks = [
            Block(f"model.layers.{index}", config, owned, placement, group, kernels)
            for index in range(config.num_layers)
        ]
        self.norm = RMSNorm("model.norm.weight", config.hidden_size, config.rms_norm_eps, placement)
        self.head = ParallelHead(
            Rows("lm_head.weight", config.vocab_size, owned.vocabulary),
            [len(share.vocabulary) for share in shares],
            config.hidden_size,
            placement,
            group,
            tied=self.embedding if config.tie_word_embeddings else None,
        )
        self.cos_sin = rotary_table(config.rope, config.head_dim, max_positions).to(placement.device)

    def layers(self) -> Iterator[Layer]:
        """Everything with weights, in the order of the computation."""
        yield self.embedding
        for block in self.blocks:
            yield from block.layers()
        yield from (self.norm, self.head)

    def hidden(self, batch: Batch, caches: list[KVCache]) -> tuple[Tensor, Tensor]:
        """What the last layer gives and the residual to add to it, each ``[T, hidden]``; writes the KV of the batch."""
        return self.transform(self.embedding(batch.token_ids), batch, caches)

    def transform(self, x: Tensor, batch: Batch, caches: list[KVCache]) -> tuple[Tensor, Tensor]:
        """The same of the tokens' embeddings, which it may overwrite."""
        residual = x
        for index, block in enumerate(self.blocks):
            x, residual = block(x, residual if index else None, caches[index], self.cos_sin, batch)
        return x, residual

    def logits(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """float32 ``[R, vocabulary]`` on rank 0 of ``[R, hidden]``; None on the others. May overwrite ``residual``."""
        return self.head(self.final(x, residual))

    def final(self, x: Tensor, residual: Tensor) -> Tensor:
        """The last hidden states ``[R, hidden]``, the same on all ranks; may overwrite ``residual``."""
        return self.norm(x, residual)[0]


def _gate(activation: Activation, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    """``[T, 2 * I] -> [T, I]``: activation(gate) * up."""
    return {
        Activation.SILU: kernels.silu_mul,
        Activation.GELU_TANH: kernels.gelu_mul,
        Activation.GELU: kernels.gelu_erf_mul,
    }[activation]


def _scaled(run: range, factor: int) -> range:
    return range(run.start * factor, run.stop * factor)
