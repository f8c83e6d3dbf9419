"""Every head, column and row has an owner, for any number of ranks that leaves none without work."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.errors import ConfigurationError
from octavo.worker.model.config import ModelConfig
from octavo.worker.model.packing import Packing, PackingMethod
from octavo.worker.model.partition import partition
from octavo.worker.model.rope_config import RopeConfig

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_query_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    rope=RopeConfig(100000.0),
    eos_token_ids=(2,),
    dtype="float32",
)


def test_smollm2_over_two_ranks() -> None:
    first, second = partition(SMOLLM2, 2)
    assert (first.kv_heads, second.kv_heads) == (range(2), range(2, 3))
    assert (first.query_heads, second.query_heads) == (range(6), range(6, 9))
    assert (len(first.mlp_columns), len(second.mlp_columns)) == (768, 768)


def test_beyond_the_kv_heads_they_are_replicated() -> None:
    ranks = partition(SMOLLM2, 5)
    assert [list(rank.kv_heads) for rank in ranks] == [[0], [0], [1], [1], [2]]
    assert [list(rank.query_heads) for rank in ranks] == [[0, 1], [2], [3, 4], [5], [6, 7, 8]]


def test_one_query_head_each_is_the_limit() -> None:
    assert all(len(rank.query_heads) == 1 for rank in partition(SMOLLM2, 9))
    with pytest.raises(ConfigurationError, match=r"--tensor-parallel-size is 10.*9 query heads.*the limit is 9"):
        partition(SMOLLM2, 10)


def test_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--tensor-parallel-size is 0"):
        partition(SMOLLM2, 0)


def test_columns_that_share_a_scale_stay_together() -> None:
    plain = dataclasses.replace(SMOLLM2, intermediate_size=1344)
    grouped = dataclasses.replace(plain, packing=Packing(PackingMethod.AWQ, 192))
    assert [len(rank.mlp_columns) for rank in partition(plain, 3)] == [448, 448, 448]
    assert [len(rank.mlp_columns) for rank in partition(grouped, 3)] == [576, 384, 384]


def test_no_rank_is_left_without_two_columns_of_a_byte() -> None:
    narrow = dataclasses.replace(SMOLLM2, intermediate_size=8, packing=Packing(PackingMethod.AWQ, None))
    assert [len(rank.mlp_columns) for rank in partition(narrow, 3)] == [4, 2, 2]
    with pytest.raises(ConfigurationError, match=r"is 5, but .* 4 groups of 2 MLP columns, .*the limit is 4"):
        partition(narrow, 5)


@given(
    kv_heads=st.integers(1, 12),
    group=st.integers(1, 8),
    columns=st.integers(100, 5000),
    rows=st.integers(100, 5000),
    data=st.data(),
)
def test_everything_is_owned_once(kv_heads: int, group: int, columns: int, rows: int, data: st.DataObject) -> None:
    query_heads = kv_heads * group
    config = dataclasses.replace(
        SMOLLM2, num_kv_heads=kv_heads, num_query_heads=query_heads, intermediate_size=columns, vocab_size=rows
    )
    size = data.draw(st.integers(1, query_heads), label="size")
    ranks = partition(config, size)
    assert [head for rank in ranks for head in rank.query_heads] == list(range(query_heads))
    assert [column for rank in ranks for column in rank.mlp_columns] == list(range(columns))
    assert [row for rank in ranks for row in rank.vocabulary] == list(range(rows))
    for rank in ranks:
        assert min(map(len, (rank.query_heads, rank.kv_heads, rank.mlp_columns, rank.vocabulary))) >= 1
        assert {head // group for head in rank.query_heads} == set(rank.kv_heads)
        assert len(rank.query_heads) % len(rank.kv_heads) == 0
