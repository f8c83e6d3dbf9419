"""Every test here states what a kernel does. It runs on the kernels for CPUs, and on the Triton kernels where a GPU is.

With ``TRITON_INTERPRET=1`` in the environment the same tests run on the Triton kernels, interpreted
(``test_triton.py`` starts them so). Triton must see the variable when it is first imported, hence a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.backend import Kernels, cpu_kernels, reference_kernels, triton_kernels
from octavo.kernels.kv_cache import LARGEST, KVCache, quantize_tokens

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
MAKERS = {"cpu": cpu_kernels, "reference": reference_kernels, "triton": triton_kernels}

# The interpreter takes a second where others take a millisecond.
settings.register_profile("kernels", max_examples=8 if INTERPRETED else 60, deadline=None, derandomize=True)


@pytest.fixture(scope="session", params=["triton"] if INTERPRETED else ["cpu", "reference"] + ["triton"] * ON_GPU)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Tests make their tensors on the default device."""
    if request.param == "triton" and ON_GPU:
        torch.set_default_device("cuda")
    yield MAKERS[request.param]()
    torch.set_default_device(None)


@pytest.fixture(scope="session")
def interpreted() -> bool:
    return INTERPRETED


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def wide_kernels(kernels: Kernels) -> Kernels:
    """As on a machine of 64 multiprocessors, which Triton fills by dividing the keys of a sequence, or a sum."""
    return with_triton_options(kernels, num_multiprocessors=64)


@pytest.fixture(scope="session")
def invariant_kernels(kernels: Kernels) -> Kernels:
    return with_triton_options(kernels, batch_invariant=True)


def with_triton_options(kernels: Kernels, **options: Any) -> Kernels:
    """Other backends stay as they are. Experts have one way for any number of multiprocessors."""
    if kernels.name != "triton":
        return kernels
    from octavo.kernels.triton_attention import prepare_paged_attention
    from octavo.kernels.triton_experts import Experts
    from octavo.kernels.triton_linear import prepare_linear

    return replace(
        kernels,
        paged_attention=prepare_paged_attention(**options),
        prepare_linear=partial(prepare_linear, **options),
        prepare_experts=partial(Experts, batch_invariant=options.get("batch_invariant", False)),
    )


@dataclass(frozen=True)
class Batch:
    """A ragged batch in a cache whose unwritten slots hold NaN, and what attention must give for it."""

    query: Tensor
    cache: KVCache
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    expected: Tensor

    def attend(
        self,
        kernels: Kernels,
        out: Tensor | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
    ) -> Tensor:
        """The bounds are those of the batch unless others are given."""
        return kernels.paged_attention(
            self.query,
            self.cache,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
            scale=self.scale,
            max_query_len=max_query_len or int(self.query_start_loc.diff().max()),
            max_seq_len=max_seq_len or int(self.seq_lens.max()),
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            out=out,
        )

    def pick(self, seq: int, rows: slice, seq_len: int) -> Batch:
        """A batch of one: the queries in some of a sequence's rows, the last of them at ``seq_len - 1``."""
        return replace(
            self,
            query=self.query[rows],
            expected=self.expected[rows],
            block_tables=self.block_tables[seq : seq + 1],
            seq_lens=torch.tensor([seq_len], dtype=torch.int32),
            query_start_loc=torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
        )


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """The definition, in float64: query ``[n, heads, D]``, key and value ``[len, kv_heads, D]``."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    num_queries, num_keys = query.shape[0], key.shape[0]
    positions = torch.arange(num_keys - num_queries, num_keys)[:, None]
    visible = torch.arange(num_keys) <= positions
    if sliding_window is not None:
        visible &= torch.arange(num_keys) > positions - sliding_window
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def make_unwritten_cache(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> KVCache:
    """What can be NaN is: the values, or the scales."""
    shape = (2, num_blocks, num_kv_heads, block_size)
    if dtype == torch.int8:
        data = torch.full((*shape, head_dim), 111, dtype=dtype)
    else:
        data = torch.full((*shape, head_dim), torch.nan).to(dtype)
    return KVCache(*data, *(torch.full(shape, torch.nan) if dtype in LARGEST else (None, None)))


def make_batch(
    seqs: list[tuple[int, int]],
    *,
    num_kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    num_padding_rows: int = 0,
    seed: int = 0,
) -> Batch:
    """``seqs``: (tokens cached before, new tokens) of each sequence. Blocks are dealt out in random order."""
    generator = torch.Generator(device=torch.get_default_device()).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_blocks = [-(-(cached + new) // block_size) for cached, new in seqs]
    total_blocks = sum(num_blocks) + 2
    cache = make_unwritten_cache(total_blocks, num_kv_heads, block_size, head_dim, kv_dtype or dtype)
    order = torch.randperm(total_blocks, generator=generator)
    tables = torch.zeros(len(seqs), max([*num_blocks, 1]) + 1, dtype=torch.int32)
    starts = torch.tensor([0, *(new for _, new in seqs)]).cumsum(0).int()
    query = randn(int(starts[-1]) + num_padding_rows, num_kv_heads * group, head_dim)
    expected = torch.zeros(query.shape, dtype=torch.float64)
    for index, (cached, new) in enumerate(seqs):
        tables[index, : num_blocks[index]] = order[sum(num_blocks[:index]) :][: num_blocks[index]]
        positions = torch.arange(cached + new)
        slots = tables[index, positions // block_size] * block_size + positions % block_size
        key, value = randn(2, cached + new, num_kv_heads, head_dim)
        reference.write_kv(key, value, cache, slots)
        if kv_dtype in LARGEST:
            key, value = (
                x.double() * scale[..., None] for x, scale in (quantize_tokens(y, kv_dtype) for y in (key, value))
            )
        rows = slice(int(starts[index]), int(starts[index + 1]))
        expected[rows] = dense_attention(query[rows], key, value, head_dim**-0.5, sliding_window, soft_cap)
    lens = torch.tensor([cached + new for cached, new in seqs], dtype=torch.int32)
    return Batch(query, cache, tables, lens, starts, head_dim**-0.5, sliding_window, soft_cap, expected)


@pytest.fixture(scope="session")
def batch_maker():  # type: ignore[no-untyped-def]
    return make_batch


@pytest.fixture(scope="session")
def unwritten_cache():  # type: ignore[no-untyped-def]
    return make_unwritten_cache
