"""Which part of the model each rank owns.

Up to as many ranks as there are KV heads, these are dealt out in runs as even as can be, and each takes its group of
query heads along; SmolLM2 (9 query, 3 KV heads) over two ranks::

    rank 0   KV heads 0 1   query heads 0 1 2 3 4 5
    rank 1   KV heads 2     query heads 6 7 8

Beyond that every KV head is held by several ranks, which share out its query heads::

    5 ranks  KV heads 0 | 0 | 1 | 1 | 2    query heads 0 1 | 2 | 3 4 | 5 | 6 7 8
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from ..errors import ConfigurationError
from .config import ModelConfig

_UNIT = 64
"""MLP columns and vocabulary rows are dealt out in units of this many, so that kernels see whole tiles."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The runs of heads, columns and rows that one rank owns."""

    query_heads: range
    kv_heads: range
    mlp_columns: range
    vocabulary: range
    expert_columns: range
    """Of every expert of a mixture."""


def partition(config: ModelConfig, size: int) -> tuple[Partition, ...]:
    """What each of ``size`` ranks owns. Raises ConfigurationError when a rank would be left without work, or a group
    of input channels, which share a scale, would be cut in two."""
    check_size(config, size)
    _check_columns(config, size)
    heads = _share_kv_heads(config, size) if size <= config.num_kv_heads else _replicate_kv_heads(config, size)
    if size > 1 and config.packing is not None and config.packing.group_size is not None:
        _check_groups(config, config.packing.group_size, config.packing.is_permuted, [query for query, _ in heads])
    columns = _deal(config.intermediate_size, size, _group_size(config))
    rows = _deal(config.vocab_size, size)
    experts = [range(0)] * size if config.experts is None else _deal(config.experts.intermediate_size, size)
    return tuple(Partition(*heads[rank], columns[rank], rows[rank], experts[rank]) for rank in range(size))


def check_size(config: ModelConfig, size: int) -> None:
    """Raises ConfigurationError, with the numbers, when the model cannot be divided over ``size`` ranks."""
    if size < 1:
        raise ConfigurationError(f"--tensor-parallel-size is {size}, expected at least 1")
    for count, what in (
        (config.num_query_heads, "query heads"),
        (config.intermediate_size, "MLP columns"),
        (None if config.experts is None else config.experts.intermediate_size, "columns of an expert"),
        (config.vocab_size, "vocabulary rows"),
    ):
        if count is not None and size > count:
            raise ConfigurationError(
                f"--tensor-parallel-size is {size}, but the model has {count} {what}, "
                f"so that {size - count} of the ranks would get none; the limit is {count}"
            )


def split(total: int, size: int) -> list[range]:
    """``range(total)`` in ``size`` runs, as even as can be, the longer ones first."""
    quotient, remainder = divmod(total, size)
    stops = [rank * quotient + min(rank, remainder) for rank in range(size + 1)]
    return [range(start, stop) for start, stop in pairwise(stops)]


def _group_size(config: ModelConfig) -> int:
    """Input channels that must stay together: those of a group, or the two of a byte."""
    return 1 if config.packing is None else config.packing.group_size or 2


def _check_columns(config: ModelConfig, size: int) -> None:
    group_size = _group_size(config)
    num_groups = config.intermediate_size // group_size
    if 1 < size > num_groups:
        raise ConfigurationError(
            f"--tensor-parallel-size is {size}, but the checkpoint has {num_groups} groups of {group_size} MLP "
            f"columns, which cannot be cut; the limit is {num_groups}"
        )


def _check_groups(config: ModelConfig, group_size: int, is_permuted: bool, query_heads: list[range]) -> None:
    size = len(query_heads)
    if is_permuted:
        raise ConfigurationError(
            f"--tensor-parallel-size is {size}, but this checkpoint's groups of {group_size} input channels are "
            "scattered (desc_act), so that no rank can own whole groups; the limit is 1"
        )
    for rank, heads in enumerate(query_heads):
        if heads.start * config.head_dim % group_size:
            raise ConfigurationError(
                f"--tensor-parallel-size is {size}: rank {rank} would begin with query head {heads.start}, input "
                f"channel {heads.start * config.head_dim} of o_proj, within one of the groups of "
                f"{group_size} that the checkpoint is packed in"
            )


def _deal(total: int, size: int, least: int = 1) -> list[range]:
    """Like ``split``, in whole units where there are enough of them; the last run takes what is over.

    A unit is a multiple of ``least``, of which there are at least ``size``.
    """
    unit = next(unit for unit in (math.lcm(_UNIT, least), least) if total >= unit * size)
    units = split(-(-total // unit), size)
    return [range(run.start * unit, min(run.stop * unit, total)) for run in units]


def _share_kv_heads(config: ModelConfig, size: int) -> list[tuple[range, range]]:
    group = config.num_query_heads // config.num_kv_heads
    runs = split(config.num_kv_heads, size)
    return [(range(run.start * group, run.stop * group), run) for run in runs]


def _replicate_kv_heads(config: ModelConfig, size: int) -> list[tuple[range, range]]:
    group = config.num_query_heads // config.num_kv_heads
    heads = []
    for kv_head, ranks in enumerate(split(size, config.num_kv_heads)):
        for run in split(group, len(ranks)):
            first = kv_head * group
            heads.append((range(first + run.start, first + run.stop), range(kv_head, kv_head + 1)))
    return heads
