"""Paged attention in Triton: prefill, chunks, decode and any mix of them, launched without asking the device."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from .backend import PagedAttention
from .kv_cache import KVCache
from .triton_attention_kernels import paged_attention_kernel, reduce_splits_kernel
from .triton_attention_launch import Launch, Shape, choose_launches, invariant_launch
from .triton_device import Device

LOG2_E = math.log2(math.e)
ANY_NUMBER = 2**31 - 1
REDUCED_AT_ONCE = 16
"""Splits that one step of the reduction adds up."""


def prepare_paged_attention(*, batch_invariant: bool = False, num_multiprocessors: int | None = None) -> PagedAttention:
    """``reference.paged_attention``, in Triton. A token's heads must lie side by side in ``query`` and ``out``.

    ``batch_invariant``: a query's result depends on its own sequence alone, bit for bit: neither on what else is in the
    batch nor on how the prompt was cut into chunks. Few long sequences then decode several times slower, since their
    keys are not divided. ``num_multiprocessors`` stands for the device's own.
    """

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
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
        num_seqs, num_kv_heads = seq_lens.shape[0], cache.key.shape[1]
        if query.shape[0] == 0 or num_seqs == 0:
            return out
        device = Device.of(query.device)
        if num_multiprocessors is not None:
            device = replace(device, num_multiprocessors=num_multiprocessors)
        if cache.key.dtype == torch.float8_e4m3fn and not device.has_fp8:
            key, value = cache.key.view(torch.uint8), cache.value.view(torch.uint8)
            cache = replace(cache, key=key, value=value)
        shape = Shape(query.shape[1] // num_kv_heads, query.shape[2], query.element_size(), cache.key.element_size())
        if batch_invariant:
            launches = [invariant_launch(shape, device)]
        else:
            launches = choose_launches(shape, device, num_seqs, num_kv_heads, max_query_len, max_seq_len)
        batch = _Batch(
            query,
            cache,
            block_tables,
            seq_lens,
            query_start_loc,
            scale,
            max_query_len,
            sliding_window,
            soft_cap,
            out,
            shape,
        )
        for launch in launches:
            batch.attend(launch)
        return out

    return paged_attention


@dataclass(frozen=True)
class _Batch:
    """The arguments of one call."""

    query: Tensor
    cache: KVCache
    block_tables: Tensor
    seq_lens: Tensor
    starts: Tensor
    scale: float
    max_query_len: int
    sliding_window: int | None
    soft_cap: float | None
    out: Tensor
    shape: Shape

    def attend(self, launch: Launch) -> None:
        num_tokens, num_heads, head_dim = self.query.shape
        num_seqs, num_kv_heads = self.seq_lens.shape[0], self.cache.key.shape[1]
        num_blocks = num_seqs if launch.one_block else num_tokens // launch.block_q + num_seqs
        partial = partial_sums = None
        if launch.num_splits > 1:
            # In a graph's capture they come from its pool: the addresses stay.
            splits = (num_seqs * launch.block_q, num_heads, launch.num_splits)
            partial = self.query.new_empty((*splits, head_dim), dtype=torch.float32)
            partial_sums = self.query.new_empty((*splits[:2], 2, launch.num_splits), dtype=torch.float32)
        self._walk(launch, (num_blocks, num_kv_heads, launch.num_splits), partial, partial_sums)
        if launch.num_splits > 1:
            most_queries = min(launch.block_q, self.max_query_len)
            self._reduce(launch, (num_seqs, num_heads, most_queries), partial, partial_sums)

    def _walk(
        self, launch: Launch, grid: tuple[int, int, int], partial: Tensor | None, partial_sums: Tensor | None
    ) -> None:
        cache, cap = self.cache, self.soft_cap
        scale_strides = (0, 0) if cache.key_scale is None else cache.key_scale.stride()[:2]
        paged_attention_kernel[grid](
            self.query,
            cache.key,
            cache.value,
            cache.key_scale,
            cache.value_scale,
            self.out,
            partial,
            partial_sums,
            self.block_tables,
            self.seq_lens,
            self.starts,
            self.sliding_window,
            None if cap is None else 2 * LOG2_E * self.scale / cap,
            LOG2_E * (self.scale if cap is None else cap),
            self.seq_lens.shape[0],
            launch.fewest_queries,
            launch.block_q if launch.one_block else ANY_NUMBER,
            self.query.stride(0),
            self.out.stride(0),
            cache.key.stride(0),
            cache.key.stride(1),
            *scale_strides,
            self.block_tables.stride(0),
            GROUP=self.shape.group,
            HEAD_DIM=self.shape.head_dim,
            DIM_PADDED=self.shape.dim_padded,
            BLOCK_SIZE=cache.key.shape[2],
            ROWS=launch.rows,
            BLOCK_Q=launch.block_q,
            TILE=launch.tile,
            NUM_SPLITS=launch.num_splits,
            ONE_BLOCK=launch.one_block,
            FULL_TILES=launch.full_tiles,
            # Triton's interpreter, in which the tests run, keeps bfloat16 as integers and would multiply those.
            UPCAST=triton.knobs.runtime.interpret and self.query.dtype == torch.bfloat16,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )

    def _reduce(
        self, launch: Launch, grid: tuple[int, int, int], partial: Tensor | None, partial_sums: Tensor | None
    ) -> None:
        reduce_splits_kernel[grid](
            partial,
            partial_sums,
            self.out,
            self.seq_lens,
            self.starts,
            self.sliding_window,
            launch.block_q,
            self.out.stride(0),
            HEAD_DIM=self.shape.head_dim,
            DIM_PADDED=self.shape.dim_padded,
            BLOCK_Q=launch.block_q,
            TILE=launch.tile,
            NUM_SPLITS=launch.num_splits,
            CHUNK=min(REDUCED_AT_ONCE, launch.num_splits),
        )
