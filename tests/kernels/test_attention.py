"""Paged attention equals its dense definition, whatever the batch, the blocks and the dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.backend import Kernels

MakeBatch = Callable[..., Any]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
HEAD_SHAPES = [(1, 64), (3, 64), (4, 80), (7, 64), (8, 128)]
"""(query heads to a KV head, head size): groups that fill a tile of rows and that do not; a size no power of 2."""

sequences = st.lists(
    st.tuples(st.integers(0, 70), st.integers(0, 12) | st.sampled_from([1, 1, 1, 40])).filter(lambda s: sum(s) > 0),
    min_size=1,
    max_size=6,
)


@settings(settings.get_profile("kernels"))
@given(
    seqs=sequences,
    heads=st.sampled_from(HEAD_SHAPES),
    num_kv_heads=st.integers(1, 3),
    block_size=st.sampled_from([1, 8, 16, 24]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
def test_a_ragged_batch_equals_the_definition(
    kernels: Kernels,
    batch_maker: MakeBatch,
    seqs: list[tuple[int, int]],
    heads: tuple[int, int],
    num_kv_heads: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    group, head_dim = heads
    batch = batch_maker(
        seqs,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        seed=seed,
    )
    attended = batch.attend(kernels)
    torch.testing.assert_close(attended.double(), batch.expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("heads", HEAD_SHAPES)
def test_decode_of_many_sequences(kernels: Kernels, batch_maker: MakeBatch, heads: tuple[int, int]) -> None:
    batch = batch_maker([(n * 13, 1) for n in range(9)], group=heads[0], head_dim=heads[1])
    torch.testing.assert_close(batch.attend(kernels).double(), batch.expected, atol=2e-5, rtol=0)


def test_a_long_prompt_beside_decodes_and_a_chunk(kernels: Kernels, batch_maker: MakeBatch) -> None:
    batch = batch_maker([(100, 1), (0, 130), (64, 65), (3, 1)])
    torch.testing.assert_close(batch.attend(kernels).double(), batch.expected, atol=2e-5, rtol=0)


def test_rows_of_no_sequence_are_left_alone(kernels: Kernels, batch_maker: MakeBatch) -> None:
    batch = batch_maker([(20, 1), (0, 3)], num_padding_rows=5)
    out = torch.full_like(batch.query, 7.0)
    assert batch.attend(kernels, out=out) is out
    assert (out[4:] == 7.0).all()
    torch.testing.assert_close(out[:4].double(), batch.expected[:4], atol=2e-5, rtol=0)


def test_query_may_be_a_slice_of_a_fused_projection(kernels: Kernels, batch_maker: MakeBatch) -> None:
    batch = batch_maker([(20, 1), (0, 30)])
    num_tokens, num_heads, head_dim = batch.query.shape
    fused = torch.full((num_tokens, num_heads + 4, head_dim), torch.nan)
    fused[:, :num_heads] = batch.query
    attended = kernels.paged_attention(
        fused[:, :num_heads],
        batch.cache,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        scale=batch.scale,
        max_query_len=30,
        max_seq_len=30,
    )
    torch.testing.assert_close(attended.double(), batch.expected, atol=2e-5, rtol=0)


def test_one_sequence_does_not_depend_on_the_others(kernels: Kernels, batch_maker: MakeBatch) -> None:
    """Exactly: batch mates must not change a sampled token."""
    batch = batch_maker([(50, 1), (7, 1), (33, 1)])
    together = batch.attend(kernels)
    for index in range(3):
        alone = kernels.paged_attention(
            batch.query[index : index + 1],
            batch.cache,
            batch.block_tables[index : index + 1],
            batch.seq_lens[index : index + 1],
            torch.tensor([0, 1], dtype=torch.int32),
            scale=batch.scale,
            max_query_len=1,
            max_seq_len=int(batch.seq_lens[index]),
        )
        assert torch.equal(alone[0], together[index])


def test_two_threads_give_the_same(kernels: Kernels, batch_maker: MakeBatch) -> None:
    batch = batch_maker([(n * 13, 1) for n in range(9)])
    alone = batch.attend(kernels)
    torch.set_num_threads(2)
    torch.testing.assert_close(batch.attend(kernels), alone, atol=1e-6, rtol=0)
