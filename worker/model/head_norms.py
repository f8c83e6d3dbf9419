"""Norms of queries and keys, before their rotary positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.backend import Kernels
from .config import QueryKeyNorm
from .layers import Layer
from .matrices import Part
from .parameters import NormWeight
from .shard import Shard


class QueryKeyNormLayer(Layer, Protocol):
    """What attention asks of either."""

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Both ``[T, heads, D]``; may work in place."""
        ...


class HeadNorm:
    """Each head by itself; all share one weight ``[D]``, and every rank holds it."""

    def __init__(self, prefix: str, shard: Shard) -> None:
        config, dim = shard.config, shard.config.head_dim
        names = f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight"
        self._weights = [NormWeight(name, dim, range(dim), shard.placement, config.norm_offset) for name in names]
        self._eps = config.rms_norm_eps

    def parts(self) -> Iterator[Part]:
        for weight in self._weights:
            yield from weight.parts()

    def prepare(self, kernels: Kernels) -> None:
        self._norm = kernels.norm_heads
        self._query_weight, self._key_weight = (weight.prepared() for weight in self._weights)

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self._norm(query, key, self._query_weight, self._key_weight, self._eps)


class ProjectionNorm:
    """All heads together, over all ranks: these sum up the squares of what each has.

    A head that several ranks hold counts with each of them for its share.
    """

    def __init__(self, prefix: str, shard: Shard) -> None:
        config, owned, dim = shard.config, shard.owned, shard.config.head_dim
        sides = (("q_norm", config.num_query_heads, owned.query_heads), ("k_norm", config.num_kv_heads, owned.kv_heads))
        self._sizes = [total * dim for _, total, _ in sides]
        self._weights = [
            NormWeight(
                f"{prefix}.{name}.weight",
                total * dim,
                range(heads.start * dim, heads.stop * dim),
                shard.placement,
                config.norm_offset,
            )
            for name, total, heads in sides
        ]
        self._key_share = 1 / sum(owned.kv_heads.start in share.kv_heads for share in shard.shares)
        self._eps = config.rms_norm_eps
        self._group = shard.group

    def parts(self) -> Iterator[Part]:
        for weight in self._weights:
            yield from weight.parts()

    def prepare(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._query_weight, self._key_weight = (weight.prepared() for weight in self._weights)

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self._group.size == 1:
            return self._whole(query, self._query_weight), self._whole(key, self._key_weight)
        num_queries, num_keys = query.shape[1], key.shape[1]
        both = self._kernels.join_columns([query.flatten(1), key.flatten(1)])
        normed = self._kernels.between(self._over_ranks, both).view(-1, num_queries + num_keys, query.shape[2])
        return normed[:, :num_queries], normed[:, num_queries:]

    def _whole(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x.flatten(1), weight, self._eps)[0].view(x.shape)

    def _over_ranks(self, both: Tensor) -> Tensor:
        query, key = both.split_with_sizes([len(self._query_weight), len(self._key_weight)], dim=1)
        squares = [_squares(query), _squares(key) * self._key_share]
        sums = self._group.all_reduce(torch.cat(squares, dim=1))
        factors = (sums / sums.new_tensor(self._sizes) + self._eps).rsqrt_()
        return torch.cat(
            [
                (query * factors[:, :1]).to(both.dtype) * self._query_weight,
                (key * factors[:, 1:]).to(both.dtype) * self._key_weight,
            ],
            dim=1,
        )


def _squares(x: Tensor) -> Tensor:
    """float32 ``[T, 1]``"""
    return x.float().square().sum(dim=1, keepdim=True)


def query_key_norm(prefix: str, shard: Shard) -> QueryKeyNormLayer | None:
    """The one that the model has, if it has any."""
    kind = shard.config.query_key_norm
    if kind is None:
        return None
    return HeadNorm(prefix, shard) if kind is QueryKeyNorm.HEADS else ProjectionNorm(prefix, shard)
