"""Compiling the CPU kernels of a worker process ahead of its first request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .backend import Kernels
from .kv_cache import KVPool
from .quantized import Weight
from .sampling import SamplingTensors


def warm_up(
    kernels: Kernels,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    weight_forms: Sequence[Callable[[Tensor], Weight]],
    kv_dtype: torch.dtype,
) -> None:
    """Compiles, or loads from the cache, every kernel that a rank will call that has these heads.

    ``weight_forms`` make of a float32 weight what the model's products are prepared with.
    """
    for form in weight_forms:
        kernels.prepare_linear(form(torch.zeros(16, 128)))(torch.zeros(1, 128))
        product = kernels.prepare_linear(form(torch.zeros(1024, 512)))
        for num_rows in (1, 16, 64):  # one thread or several, tiles or oneDNN
            product(torch.zeros(num_rows, 512))
    for num_tokens in (1, 1024):
        _touch(kernels, num_tokens, num_query_heads, num_kv_heads, head_dim, kv_dtype)
    for num_rows in (1, 2):
        _touch_sample(kernels, num_rows, vocab_size)


def _touch(
    kernels: Kernels, num_tokens: int, num_query_heads: int, num_kv_heads: int, head_dim: int, kv_dtype: torch.dtype
) -> None:
    query = torch.zeros(num_tokens, num_query_heads, head_dim)
    key, value = torch.zeros(2, num_tokens, num_kv_heads, head_dim)
    (cache,) = KVPool.allocate(1, num_tokens, num_kv_heads, 1, head_dim, kv_dtype, query.device).layers()
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
    ones, zeros = torch.ones(num_rows), torch.zeros(num_rows)
    logits = torch.zeros(num_rows, vocab_size)
    kernels.sample(logits, SamplingTensors(ones, off, ones, zeros, seeds, whole, whole))
    kernels.logprobs(logits, seeds, 1)
