"""Attention of a transformer layer over paged KV."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from ...kernels.kv_cache import KVCache
from .batch import Batch
from .head_norms import query_key_norm
from .layers import Layer
from .parameters import Rows
from .shard import Shard


class Attention:
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions against the paged cache, all of it or within
    a sliding window (Beltagy et al. 2020)."""

    def __init__(self, prefix: str, layer: int, shard: Shard) -> None:
        config, owned, dim = shard.config, shard.owned, shard.config.head_dim
        queries, keys = config.num_query_heads * dim, config.num_kv_heads * dim
        of_rank = [_scaled(heads, dim) for heads in (owned.query_heads, owned.kv_heads, owned.kv_heads)]
        self.qkv = shard.column_parallel(
            matrices(
                prefix,
                ["q_proj", "k_proj", "v_proj"],
                [queries, keys, keys],
                of_rank,
                fused="qkv_proj" if config.fused_projections else None,
                has_bias=config.biases.qkv,
            )
        )
        self.norm = query_key_norm(prefix, shard)
        self.out = shard.row_parallel(f"{prefix}.o_proj.weight", queries, of_rank[0], has_bias=config.biases.out)
        self._kernels = shard.kernels
        self._heads = [len(owned.query_heads), len(owned.kv_heads), len(owned.kv_heads)]
        self._num_heads = sum(self._heads)
        self._head_dim = dim
        self._scale = config.attention_scale or 1 / math.sqrt(dim)
        self._soft_cap = config.attention_soft_cap
        self._window = config.window(layer)

    def layers(self) -> Iterator[Layer]:
        yield self.qkv
        if self.norm is not None:
            yield self.norm
        yield self.out

    def __call__(self, x: Tensor, cache: KVCache, cos_sin: Tensor, batch: Batch) -> Tensor:
        """``x [T, hidden] -> [T, hidden]``; writes K and V of the T tokens to ``cache``."""
        kernels = self._kernels
        heads = self.qkv(x).view(-1, self._num_heads, self._head_dim)
        query, key, value = heads.split_with_sizes(self._heads, dim=1)
        if self.norm is not None:
            query, key = self.norm(query, key)
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
            soft_cap=self._soft_cap,
        )
        return self.out(attended.flatten(1))


def matrices(
    prefix: str, names: list[str], totals: list[int], owned: list[range], *, fused: str | None, has_bias: bool
) -> list[Rows]:
    """Matrices that are one product: each by its name, or, where the checkpoint has them in one, by where it lies."""
    if fused is None:
        return [
            Rows(f"{prefix}.{name}.weight", total, run, has_bias)
            for name, total, run in zip(names, totals, owned, strict=True)
        ]
    starts = [sum(totals[:index]) for index in range(len(totals))]
    return [
        Rows(f"{prefix}.{fused}.weight", sum(totals), range(start + run.start, start + run.stop), has_bias)
        for start, run in zip(starts, owned, strict=True)
    ]


def _scaled(run: range, factor: int) -> range:
    return range(run.start * factor, run.stop * factor)
