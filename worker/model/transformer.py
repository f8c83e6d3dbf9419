"""The decoder of every family over paged KV: the whole transformer on one page, without a word about ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels.backend import Kernels
from ...kernels.kv_cache import KVCache
from ..collectives import Collectives
from .batch import Batch
from .block import Block
from .config import ModelConfig
from .layers import Layer, ParallelHead, VocabParallelEmbedding
from .parameters import Rows
from .partition import Partition
from .products import Placement
from .rope_config import RopeConfig
from .rotary import rotary_table
from .shard import Shard


class Transformer:
    """A decoder (Vaswani et al. 2017; Touvron et al. 2023), this rank's share of it."""

    def __init__(
        self,
        config: ModelConfig,
        shares: tuple[Partition, ...],
        placement: Placement,
        group: Collectives,
        kernels: Kernels,
        max_positions: int,
    ) -> None:
        shard = Shard(config, shares, placement, group, kernels)
        vocabulary = shard.owned.vocabulary
        self.hidden_size = config.hidden_size
        self.embedding = VocabParallelEmbedding(
            Rows("model.embed_tokens.weight", config.vocab_size, vocabulary),
            config.hidden_size,
            placement,
            group,
            config.embedding_scale,
        )
        self.blocks = [Block(layer, shard) for layer in range(config.num_layers)]
        self.norm = shard.norm("model.norm.weight")
        self.head = ParallelHead(
            Rows("lm_head.weight", config.vocab_size, vocabulary),
            [len(share.vocabulary) for share in shares],
            config.hidden_size,
            placement,
            group,
            tied=self.embedding if config.tie_word_embeddings else None,
            scale=config.logit_scale,
            soft_cap=config.logit_soft_cap,
        )
        tables = rotary_tables(config, max_positions, placement.device)
        self.rotary_tables = tuple(tables.values())
        """Each that a layer uses."""
        self._cos_sin = [tables[config.rope_of(layer)] for layer in range(config.num_layers)]

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
            x, residual = block(x, residual if index else None, caches[index], self._cos_sin[index], batch)
        return x, residual

    def logits(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """float32 ``[R, vocabulary]`` on rank 0 of ``[R, hidden]``; None on the others. May overwrite ``residual``."""
        return self.head(self.final(x, residual))

    def final(self, x: Tensor, residual: Tensor) -> Tensor:
        """The last hidden states ``[R, hidden]``, the same on all ranks; may overwrite ``residual``."""
        return self.norm(x, residual)[0]


def rotary_tables(config: ModelConfig, max_positions: int, device: torch.device) -> dict[RopeConfig, Tensor]:
    """One for each kind of rotary positions that a layer has."""
    ropes = {config.rope_of(layer): None for layer in range(config.num_layers)}
    return {rope: rotary_table(rope, config.head_dim, max_positions).to(device) for rope in ropes}
