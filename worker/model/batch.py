"""Batch: what the layers are told of a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
