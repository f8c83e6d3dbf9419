"""Compiling the CPU kernels of a worker process ahead of its first request."""

from __future__ import annotations

import torch

from .backend import Kernels
from .kv_cache import KVCache


def warm_up(kernels: Kernels, *, num_query_heads: int, num_kv_heads: int, head_dim: int, vocab_size: int) -> None:
    """Compiles, or loads from the cache, every kernel that a float32 model of these sizes will call."""
    for num_tokens in (1, 1024):
        _touch(kernels, num_tokens, num_query_heads, num_kv_heads, head_dim)
    for num_rows in (1, 2):
        _touch_sample(kernels, num_rows, vocab_size)


def _touch(kernels: Kernels, num_tokens: int, num_query_heads: int, num_kv_heads: int, head_dim: int) -> None:
    query = torch.zeros(num_tokens, num_query_heads, head_dim)
    key, value = torch.zeros(2, num_tokens, num_kv_heads, head_dim)
    cache = KVCache(*torch.zeros(2, num_tokens, num_kv_heads, 1, head_dim))
    positions = torch.arange(num_tokens)
    kernels.rotary(query, key, positions, torch.zeros(num_tokens, head_dim))
    for slots in (positions, positions.int()):
        kernels.write_kv(key, value, cache, slots)
    hidden = query.flatten(1)
    kernels.rms_norm(hidden, torch.ones(hidden.shape[1]), 1e-5, hidden.clone())
    kernels.silu_mul(hidden if hidden.shape[1] % 2 == 0 else hidden[:, :-1])
    one = torch.ones(1, dtype=torch.int32)
    table, starts = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    kernels.paged_attention(query[:1], cache, table, one, starts, scale=1.0, max_query_len=1, max_seq_len=1)


def _touch_sample(kernels: Kernels, num_rows: int, vocab_size: int) -> None:
    whole = torch.zeros(num_rows, dtype=torch.int32)
    off, seeds = torch.full_like(whole, vocab_size), torch.zeros(num_rows, dtype=torch.int64)
    ones = torch.ones(num_rows)
    kernels.sample(torch.zeros(num_rows, vocab_size), ones, off, ones, seeds, whole, whole)
