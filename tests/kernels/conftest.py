"""Every test here states what a kernel does. It runs on the kernels for CPUs, and on the Triton kernels where a GPU is.

With ``TRITON_INTERPRET=1`` in the environment the same tests run on the Triton kernels, interpreted
(``test_triton.py`` starts them so). Triton must see the variable when it is first imported, hence a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from octavo.kernels.backend import Kernels, cpu_kernels, reference_kernels, triton_kernels
from octavo.kernels.kv_cache import KVCache

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


@dataclass(frozen=True)
class Batch:
    """A ragged batch in a cache whose unwritten slots hold NaN, and what attention must give for it."""

    query: Tensor
    cache: KVCache
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    scale: float
    expected: Tensor

    def attend(self, kernels: Kernels, out: Tensor | None = None) -> Tensor:
        lens = self.query_start_loc.diff()
        return kernels.paged_attention(
            self.query,
            self.cache,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
            scale=self.scale,
            max_query_len=int(lens.max()),
            max_seq_len=int(self.seq_lens.max()),
            out=out,
        )


def dense_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The definition, in float64: query ``[n, heads, D]``, key and value ``[len, kv_heads, D]``."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    num_queries, num_keys = query.shape[0], key.shape[0]
    visible = torch.arange(num_keys) <= torch.arange(num_keys - num_queries, num_keys)[:, None]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def make_batch(
    seqs: list[tuple[int, int]],
    *,
    num_kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    num_padding_rows: int = 0,
    seed: int = 0,
) -> Batch:
    """``seqs``: (tokens cached before, new tokens) of each sequence. Blocks are dealt out in random order."""
    generator = torch.Generator(device=torch.get_default_device()).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_blocks = [-(-(cached + new) // block_size) for cached, new in seqs]
    total_blocks = sum(num_blocks) + 2
    cache = torch.full((2, total_blocks, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    order = iter(torch.randperm(total_blocks, generator=generator).tolist())
    tables = torch.zeros(len(seqs), max([*num_blocks, 1]) + 1, dtype=torch.int32)
    starts = torch.tensor([0, *(new for _, new in seqs)]).cumsum(0).int()
    query = randn(int(starts[-1]) + num_padding_rows, num_kv_heads * group, head_dim)
    expected = torch.zeros(query.shape, dtype=torch.float64)
    for index, (cached, new) in enumerate(seqs):
        tables[index, : num_blocks[index]] = torch.tensor([next(order) for _ in range(num_blocks[index])])
        key_value = randn(2, cached + new, num_kv_heads, head_dim)
        for position in range(cached + new):
            block = tables[index, position // block_size]
            cache[:, block, :, position % block_size] = key_value[:, position]
        rows = slice(int(starts[index]), int(starts[index + 1]))
        expected[rows] = dense_attention(query[rows], key_value[0], key_value[1], head_dim**-0.5)
    lens = torch.tensor([cached + new for cached, new in seqs], dtype=torch.int32)
    return Batch(query, KVCache(cache[0], cache[1]), tables, lens, starts, head_dim**-0.5, expected)


@pytest.fixture(scope="session")
def batch_maker():  # type: ignore[no-untyped-def]
    return make_batch
