"""The environment of a worker process that computes on CPUs, and compiling its kernels ahead of the first request."""

from __future__ import annotations

import torch

from .backend import Kernels


def cpu_environment(num_threads: int) -> dict[str, str]:
    """The environment variables that a worker process must be *started* with to compute on ``num_threads`` threads.

    Two traps are avoided, each of which turns an operation of 0.3 ms into one of 8 or 16 (time slices of the kernel):

    * Two pools of threads, torch's and numba's, that wait for each other's processors. numba's ``omp`` layer runs in
      the pool that torch started (one libgomp, loaded by torch, which must be imported first).
    * A thread that spins at the end of a parallel region while the one it waits for has no processor, because another
      process has it. ``passive`` lets waiting threads sleep. 30 layers of SmolLM2-135M at 16 sequences on two cores
      which other processes used as well: 95 ms, against 1,170 ms with the default and 1,780 ms with numba's own
      ``workqueue`` layer. On an idle machine it costs 10 µs a region.
    """
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "NUMBA_NUM_THREADS": str(num_threads),
        "NUMBA_THREADING_LAYER": "omp",
        "OMP_WAIT_POLICY": "passive",
    }


def warm_up(kernels: Kernels, *, num_query_heads: int, num_kv_heads: int, head_dim: int, vocab_size: int) -> None:
    """Compiles, or loads from the cache, every kernel that a float32 model of these sizes will call."""
    for num_tokens in (1, 1024):
        _touch(kernels, num_tokens, num_query_heads, num_kv_heads, head_dim)
    for num_rows in (1, 2):
        _touch_sample(kernels, num_rows, vocab_size)


def _touch(kernels: Kernels, num_tokens: int, num_query_heads: int, num_kv_heads: int, head_dim: int) -> None:
    query = torch.zeros(num_tokens, num_query_heads, head_dim)
    key, value = torch.zeros(2, num_tokens, num_kv_heads, head_dim)
    cache = torch.zeros(2, num_tokens, num_kv_heads, 1, head_dim)
    positions = torch.arange(num_tokens)
    kernels.rotary(query, key, positions, torch.zeros(num_tokens, head_dim))
    for slots in (positions, positions.int()):
        kernels.write_kv(key, value, cache[0], cache[1], slots)
    hidden = query.flatten(1)
    kernels.rms_norm(hidden, torch.ones(hidden.shape[1]), 1e-5, hidden.clone())
    kernels.silu_mul(hidden if hidden.shape[1] % 2 == 0 else hidden[:, :-1])
    one = torch.ones(1, dtype=torch.int32)
    table, starts = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    kernels.paged_attention(
        query[:1], cache[0], cache[1], table, one, starts, scale=1.0, max_query_len=1, max_seq_len=1
    )


def _touch_sample(kernels: Kernels, num_rows: int, vocab_size: int) -> None:
    whole = torch.zeros(num_rows, dtype=torch.int32)
    off, seeds = torch.full_like(whole, vocab_size), torch.zeros(num_rows, dtype=torch.int64)
    ones = torch.ones(num_rows)
    kernels.sample(torch.zeros(num_rows, vocab_size), ones, off, ones, seeds, whole, whole)
