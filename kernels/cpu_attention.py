"""Paged attention on CPUs: the kernel, what it calls for each model's sizes and stored dtype, and its call.

See cpu_attention_plan.py for how the work is divided, cpu_attention_tiles.py for what the arithmetic works on.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools

import numpy as np
import torch
from numba import prange
from torch import Tensor

from . import reference
from .cpu_attention_plan import Scratch, build_work, call_work, make_plan, merge, scratch_sizes, tokens_of_block
from .cpu_attention_softmax import LOG2_E
from .cpu_attention_tiles import Batch
from .cpu_numba import Kernel, claim_threads, compile_kernel, fingerprint
from .cpu_vectors import FP8_UNIT
from .kv_cache import KVCache

STORED = (torch.float32, torch.int8, torch.float8_e4m3fn)
"""The cache's dtypes that are read where they lie."""

PARALLEL_PAIRS = 512
"""Pairs of a token and a key, over all KV heads, below which waking other threads costs more than they bring."""


def _build(parallel: bool) -> Kernel:
    sources = fingerprint(__file__)

    def attention(
        threads,
        work_at,
        group,
        head_dim,
        block,
        num_rows,
        plan_at,
        buffers_at,
        buffer_size,
        partials_at,
        partial_size,
        *batch,
    ):
        _ = sources  # for the cache's key
        call = Batch(*batch)
        scratch = Scratch(num_rows, plan_at, buffers_at, buffer_size, partials_at, partial_size)
        num_entries, pairs = make_plan(call, plan_at, block)
        tasks = num_entries * call.num_kv_heads
        if parallel and pairs * call.num_kv_heads >= PARALLEL_PAIRS:
            for worker in prange(threads):
                call_work(work_at, call, scratch, np.int64(worker), tasks)
        else:
            call_work(work_at, call, scratch, np.int64(0), tasks)
        merge(call, scratch, num_entries, group, head_dim)

    return compile_kernel(attention, parallel=parallel)


_ATTENTION = {parallel: _build(parallel) for parallel in (False, True)}


@functools.cache
def _work(group: int, head_dim: int, kind: str) -> tuple[int, int, int, int]:
    """The kernel's second to fifth argument."""
    return build_work(head_dim, group, kind).address, group, head_dim, tokens_of_block(group)


def paged_attention(
    query: Tensor,
    cache: KVCache,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See ``reference.paged_attention``, which takes what is not float32; query may be a slice of rows."""
    out = torch.empty(query.shape, dtype=query.dtype) if out is None else out
    num_kv_heads, block_size, head_dim = cache.key.shape[1:]
    if query.dtype != torch.float32 or cache.key.dtype not in STORED or head_dim % 4 != 0:
        return reference.paged_attention(
            query,
            cache,
            block_tables,
            seq_lens,
            query_start_loc,
            scale=scale,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            out=out,
        )
    unit = FP8_UNIT if cache.key.dtype == torch.float8_e4m3fn else 1.0
    batch = Batch(
        query.data_ptr(),
        query.stride(0),
        cache.key.data_ptr(),
        cache.value.data_ptr(),
        0 if cache.key_scale is None else cache.key_scale.data_ptr(),
        0 if cache.value_scale is None else cache.value_scale.data_ptr(),
        block_tables.data_ptr(),
        seq_lens.data_ptr(),
        query_start_loc.data_ptr(),
        out.data_ptr(),
        block_tables.shape[0],
        num_kv_heads,
        block_size,
        block_tables.shape[1],
        max_seq_len if sliding_window is None else sliding_window,
        scale * unit * LOG2_E,
        unit,
        0.0 if soft_cap is None else soft_cap * LOG2_E,
    )
    group, threads = query.shape[1] // num_kv_heads, claim_threads()
    sizes = scratch_sizes(
        query.shape[0], max_query_len, block_tables.shape[0], max_seq_len, num_kv_heads, group, head_dim
    )
    memory = torch.empty(sizes.plan + threads * sizes.buffers + sizes.num_partials * sizes.partial)
    plan_at = memory.data_ptr()
    buffers_at = plan_at + 4 * sizes.plan
    partials_at = buffers_at + 4 * threads * sizes.buffers
    work = _work(group, head_dim, str(cache.key.dtype).removeprefix("torch."))
    scratch = sizes.num_rows, plan_at, buffers_at, sizes.buffers, partials_at, sizes.partial
    _ATTENTION[threads > 1](threads, *work, *scratch, *batch)
    return out
