"""Paged attention equals its dense definition, whatever the batch, the blocks and the dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.backend import Kernels, reference_kernels
from octavo.kernels.kv_cache import KVCache
from octavo.kernels.triton_attention_launch import Shape, choose_launches, choose_num_splits
from octavo.kernels.triton_device import Device

MakeBatch = Callable[..., Any]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
HEAD_SHAPES = [(1, 64), (3, 64), (4, 80), (7, 64), (8, 128), (2, 192), (4, 256)]
"""(query heads to a KV head, head size): groups that fill a tile of rows and that do not; a size no power of 2."""
KV_DTYPES = [None, torch.int8, torch.float8_e4m3fn]
"""None: as the query."""
ON_CPUS = [(1, 64), (3, 64), (7, 64), (4, 80), (8, 128)]
QUANTISED_ON_CPUS = [(3, 64), (4, 80)]
"""There each pair of a head shape and a stored dtype takes seconds to compile."""

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
    block_size=st.sampled_from([1, 16, 24, 128]),
    dtype=st.sampled_from(list(TOLERANCE)),
    kv_dtype=st.sampled_from(KV_DTYPES),
    sliding_window=st.none() | st.integers(1, 90),
    soft_cap=st.sampled_from([None, 0.5, 30.0]),
    seed=st.integers(0, 1000),
)
def test_a_ragged_batch_equals_the_definition(
    kernels: Kernels,
    batch_maker: MakeBatch,
    seqs: list[tuple[int, int]],
    heads: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    **options: Any,
) -> None:
    if kernels.name == "cpu":
        shapes = ON_CPUS if kv_dtype is None else QUANTISED_ON_CPUS
        heads = heads if heads in shapes else shapes[heads[0] % len(shapes)]
    group, head_dim = heads
    batch = batch_maker(seqs, group=group, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, **options)
    attended = batch.attend(kernels)
    torch.testing.assert_close(attended.double(), batch.expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "sliding_window"),
    [(torch.float32, None, None), (torch.float32, torch.int8, 150), (torch.bfloat16, torch.float8_e4m3fn, None)],
)
def test_long_contexts_of_few_sequences(
    wide_kernels: Kernels,
    batch_maker: MakeBatch,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    sliding_window: int | None,
) -> None:
    """Their keys are divided; a sequence that is much shorter than the bound has fewer parts, or one."""
    options = {"dtype": dtype, "kv_dtype": kv_dtype, "sliding_window": sliding_window}
    batch = batch_maker([(400, 2), (0, 2), (127, 1)], num_kv_heads=1, **options)
    attended = batch.attend(wide_kernels)
    torch.testing.assert_close(attended.double(), batch.expected, atol=TOLERANCE[dtype], rtol=0)


def test_a_long_context_beside_a_prompt(wide_kernels: Kernels, batch_maker: MakeBatch) -> None:
    batch = batch_maker([(300, 1), (30, 40), (0, 5)], num_kv_heads=1, sliding_window=190, soft_cap=20.0)
    torch.testing.assert_close(batch.attend(wide_kernels).double(), batch.expected, atol=2e-5, rtol=0)


def test_scores_far_beyond_the_soft_cap(kernels: Kernels, batch_maker: MakeBatch) -> None:
    """All are ±c: the larger ones are the same, and none overflows."""
    batch = batch_maker([(40, 2)], soft_cap=2.0)
    large, larger = (replace(batch, query=batch.query * factor) for factor in (1e6, 1e9))
    torch.testing.assert_close(large.attend(kernels), larger.attend(kernels), atol=1e-4, rtol=0)


def test_every_fp8_value_is_read_as_it_is(kernels: Kernels) -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    bits[bits & 0x7F == 0x7F] = 0
    stored = bits.view(torch.float8_e4m3fn).view(1, 1, 1, 256)
    one, zero = torch.ones(1, 1, 1), torch.zeros(1, dtype=torch.int32)
    attended = kernels.paged_attention(
        torch.zeros(1, 1, 256),
        KVCache(torch.zeros_like(stored), stored, one, one),
        zero[None],
        zero + 1,
        torch.tensor([0, 1], dtype=torch.int32),
        scale=1.0,
        max_query_len=1,
        max_seq_len=1,
    )
    assert torch.equal(attended.flatten(), stored.float().flatten())


@pytest.mark.parametrize("heads", [(1, 64), (3, 64), (7, 64), (4, 80)])
def test_decode_of_many_sequences(kernels: Kernels, batch_maker: MakeBatch, heads: tuple[int, int]) -> None:
    batch = batch_maker([(n * 17, 1) for n in range(6)], group=heads[0], head_dim=heads[1])
    torch.testing.assert_close(batch.attend(kernels).double(), batch.expected, atol=2e-5, rtol=0)


def test_a_long_prompt_beside_decodes_and_a_chunk(kernels: Kernels, batch_maker: MakeBatch) -> None:
    batch = batch_maker([(100, 1), (0, 130), (64, 65), (3, 1)], num_kv_heads=1)
    torch.testing.assert_close(batch.attend(kernels).double(), batch.expected, atol=2e-5, rtol=0)


def test_a_prompt_much_longer_than_its_window(kernels: Kernels, batch_maker: MakeBatch) -> None:
    """There are tiles of keys that only some rows of a tile of queries see."""
    batch = batch_maker([(70, 150)], num_kv_heads=1, sliding_window=20)
    torch.testing.assert_close(batch.attend(kernels).double(), batch.expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("seq", [(150, 1), (100, 60)])
def test_scores_far_apart(kernels: Kernels, batch_maker: MakeBatch, seq: tuple[int, int]) -> None:
    """One key outweighs all before it, again and again along the sequence."""
    batch = batch_maker([seq], num_kv_heads=1)
    apart = replace(batch, scale=40 * batch.scale)
    expected = apart.attend(reference_kernels())
    torch.testing.assert_close(apart.attend(kernels), expected, atol=1e-3, rtol=0)


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


def test_padding_of_a_captured_graph_is_left_alone(wide_kernels: Kernels, batch_maker: MakeBatch) -> None:
    """Its sequences have neither keys nor queries, and its bounds are those of the capture."""
    batch = batch_maker([(300, 1), (33, 1), (0, 0), (0, 0)], num_kv_heads=1, num_padding_rows=2)
    out = torch.full_like(batch.query, 7.0)
    batch.attend(wide_kernels, out=out, max_query_len=1, max_seq_len=4096)
    assert (out[2:] == 7.0).all()
    torch.testing.assert_close(out[:2].double(), batch.expected[:2], atol=2e-5, rtol=0)


def test_one_sequence_does_not_depend_on_the_others(invariant_kernels: Kernels, batch_maker: MakeBatch) -> None:
    """Exactly: batch mates must not change a sampled token."""
    batch = batch_maker([(50, 1), (7, 1), (33, 1)])
    together = batch.attend(invariant_kernels)
    for index in range(3):
        alone = batch.pick(index, slice(index, index + 1), int(batch.seq_lens[index]))
        assert torch.equal(alone.attend(invariant_kernels)[0], together[index])


def test_chunks_of_a_prompt_give_what_it_gives_whole(invariant_kernels: Kernels, batch_maker: MakeBatch) -> None:
    """Exactly on GPUs: there, being batch invariant is a promise."""
    tolerance = 0.0 if invariant_kernels.name == "triton" else 1e-5
    batch = batch_maker([(0, 90)], num_kv_heads=1, sliding_window=70)
    whole = batch.attend(invariant_kernels)
    for start, end in [(0, 21), (21, 89), (89, 90)]:
        chunk = batch.pick(0, slice(start, end), end).attend(invariant_kernels)
        torch.testing.assert_close(chunk, whole[start:end], atol=tolerance, rtol=0)


def test_two_threads_give_the_same(kernels: Kernels, batch_maker: MakeBatch) -> None:
    batch = batch_maker([*((n * 17, 1) for n in range(6)), (40, 90)])
    alone = batch.attend(kernels)
    torch.set_num_threads(2)
    torch.testing.assert_close(batch.attend(kernels), alone, atol=1e-6, rtol=0)


def test_a_batch_that_fills_the_machine_is_not_divided() -> None:
    assert choose_num_splits(num_programs=64 * 8, max_seq_len=4096, num_multiprocessors=128) == 1


def test_fewer_sequences_are_divided_into_more_parts() -> None:
    assert [choose_num_splits(n * 8, 65536, 132) for n in (1, 4, 16)] == [64, 32, 8]


def test_a_longer_context_is_divided_into_more_parts() -> None:
    assert [choose_num_splits(8, length, 132) for length in (100, 1024, 8192)] == [1, 8, 64]
    assert [choose_num_splits(512, length, 132) for length in (8192, 65536)] == [2, 8]


@given(st.integers(1, 10_000), st.integers(1, 1 << 20), st.integers(1, 400))
def test_parts_are_a_power_of_two_and_their_scratch_is_bounded(programs: int, max_seq_len: int, width: int) -> None:
    splits = choose_num_splits(programs, max_seq_len, width)
    assert splits & (splits - 1) == 0
    assert splits == 1 or programs * splits <= 64 * width


def test_prompts_and_decodes_in_one_batch_are_launched_apart() -> None:
    shape, device = Shape(group=4, head_dim=128, query_bytes=2, cache_bytes=2), Device(132)
    prompts, decodes = choose_launches(shape, device, num_seqs=9, num_kv_heads=8, max_query_len=500, max_seq_len=9000)
    assert prompts.fewest_queries == decodes.block_q + 1
    assert decodes.rows == 16
    assert prompts.rows == 128
    assert len(choose_launches(shape, device, 9, 8, max_query_len=1, max_seq_len=9000)) == 1
    assert len(choose_launches(shape, device, 1, 8, max_query_len=500, max_seq_len=9000)) == 1
