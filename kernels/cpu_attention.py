"""Paged attention on CPUs: the kernel, what it calls for each model's sizes and stored dtype, and its call.

See cpu_attention_plan.py for how the work is divided, cpu_attention_work.py for what a thread does with a task.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from .cpu_attention_plan import AttentionPlanner, Planned, Scratch
from .cpu_attention_softmax import LOG2_E
from .cpu_attention_tiles import NO_WINDOW, Batch
from .cpu_attention_work import build_work, call_work, merge
from .cpu_numba import fingerprint, helper
from .cpu_program import BatchSizes, Launch, Team
from .cpu_team import compile_work, float_of_word, note_done, take, word_of_float, words
from .cpu_vectors import FP8_UNIT
from .kv_cache import KVCache

STORED = (torch.float32, torch.int8, torch.float8_e4m3fn)
"""The cache's dtypes that are read where they lie."""

PARALLEL_PAIRS = 512
"""Tokens times KV heads times the longest context, below which waking other threads costs more than they bring."""


class Own(NamedTuple):
    """The words of a layer's launches: as ``Batch``'s, floats by their bits; and what is called with them."""

    q_at: Any
    q_stride: Any
    k_at: Any
    v_at: Any
    k_scales_at: Any
    v_scales_at: Any
    out_at: Any
    num_kv_heads: Any
    block_size: Any
    window: Any
    scale: Any
    unit: Any
    soft_cap: Any
    work_at: Any
    group: Any
    head_dim: Any


_NUM_OWN, _NUM_PLANNED = len(Own._fields), len(Planned._fields)


@helper
def _read(words_at, call_at):
    """A layer's words, what changes from call to call, and both as the work takes them."""
    own, planned = Own(*words(words_at, _NUM_OWN)), Planned(*words(call_at + 8, _NUM_PLANNED))
    numbers = float_of_word(own.scale), float_of_word(own.unit), float_of_word(own.soft_cap)
    batch = Batch(*planned[:5], *own[:10], *numbers)
    return own, planned, batch, Scratch(*planned[8:])


@functools.cache
def _attend() -> Any:
    sources = fingerprint(__file__)

    def attend(words_at, call_at, tally_at, member, team):
        _ = sources  # for the cache's key
        own, planned, batch, scratch = _read(words_at, call_at)
        tasks = planned.num_tasks * batch.num_kv_heads
        call_work(own.work_at, batch, scratch, member, tasks, tally_at)
        return tasks

    return compile_work(attend)


@functools.cache
def _merge() -> Any:
    sources = fingerprint(__file__)

    def merge_all(words_at, call_at, tally_at, member, team):
        _ = sources  # for the cache's key
        own, planned, batch, scratch = _read(words_at, call_at)
        if planned.pieces == 1:
            return 0
        first, last = take(tally_at, planned.num_entries, 1)
        while first < last:
            merge(batch, scratch, first, own.group, own.head_dim)
            note_done(tally_at, first, last)
            first, last = take(tally_at, planned.num_entries, 1)
        return planned.num_entries

    return compile_work(merge_all)


def paged_attention(
    team: Team,
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
    num_kv_heads, block_size, head_dim = cache.key.shape[1:]
    if query.dtype != torch.float32 or cache.key.dtype not in STORED or head_dim % 4 != 0:
        team.must_not_record(f"attention in {query.dtype} to {cache.key.dtype}, heads of {head_dim}")
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
    out = team.empty(*query.shape) if out is None else out
    unit = FP8_UNIT if cache.key.dtype == torch.float8_e4m3fn else 1.0
    group, window = query.shape[1] // num_kv_heads, NO_WINDOW if sliding_window is None else sliding_window
    scales = (0 if tensor is None else tensor.data_ptr() for tensor in (cache.key_scale, cache.value_scale))
    at = query.data_ptr(), query.stride(0), cache.key.data_ptr(), cache.value.data_ptr(), *scales, out.data_ptr()
    numbers = scale * unit * LOG2_E, unit, 0.0 if soft_cap is None else soft_cap * LOG2_E
    work = build_work(head_dim, group, str(cache.key.dtype).removeprefix("torch."))
    bits = map(word_of_float, numbers)
    own = Own._make((*at, num_kv_heads, block_size, window, *bits, work.address, group, head_dim))
    tables = block_tables.data_ptr(), seq_lens.data_ptr(), query_start_loc.data_ptr()
    team.run(
        [Launch(_attend().address, own), Launch(_merge().address, own)],
        query.shape[0],
        planned=(
            AttentionPlanner(*tables, block_size, num_kv_heads, group, head_dim, window),
            BatchSizes(query.shape[0], block_tables.shape[0], max_query_len, max_seq_len, block_tables.shape[1]),
        ),
        is_small=query.shape[0] * max_seq_len * num_kv_heads < PARALLEL_PAIRS,
    )
    return out
