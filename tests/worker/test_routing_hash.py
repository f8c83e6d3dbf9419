"""The routing hash: what it must keep equal, what it must keep apart, and its values for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.routing_hash import HashState, RoutingHasher, mix

KEY = bytes(range(32))
int32 = st.integers(-(2**31), 2**31 - 1)
prompts = st.lists(int32, max_size=80)
salts = st.none() | st.text(max_size=8)


def hasher(block_size: int = 4) -> RoutingHasher:
    return RoutingHasher(KEY, block_size)


def test_golden_vectors() -> None:
    assert hasher().hash_blocks([1, 2, 3, 4, 5, 6, 7, 8]).tolist() == [3252335834568759295, 15356767401403770222]
    assert hasher().hash_blocks([1, 2, 3, 4], "s").tolist() == [12614964437664880411]
    assert hasher().hash_blocks([-1, 0, 2**31 - 1, -(2**31)]).tolist() == [3988756446771891613]
    assert hasher(16).hash_blocks(range(32)).tolist() == [208771153242331937, 17426512864095675410]


def test_only_full_blocks_are_hashed() -> None:
    assert hasher().hash_blocks([]).shape == (0,)
    assert hasher().hash_blocks([1, 2, 3]).shape == (0,)
    assert hasher().hash_blocks([1, 2, 3, 4, 5]).shape == (1,)
    assert hasher().hash_blocks(np.arange(8, dtype=np.int32)).dtype == np.uint64


@given(prompts, salts, st.integers(1, 7))
def test_extending_block_by_block_equals_hashing_the_whole(
    tokens: list[int], salt: str | None, block_size: int
) -> None:
    reference = hasher(block_size)
    hashes, end = reference.hash_prompt(tokens, salt)
    other = hasher(block_size)
    state = other.start(salt)
    extended = []
    for first in range(0, len(tokens) - block_size + 1, block_size):
        state, value = other.extend(state, tokens[first : first + block_size])
        extended.append(value)
    assert extended == hashes.tolist()
    assert state == end
    assert end.num_tokens == len(hashes) * block_size


@given(prompts, prompts, salts)
def test_hashes_agree_exactly_as_far_as_the_prefixes_do(a: list[int], b: list[int], salt: str | None) -> None:
    hashes_a, hashes_b = hasher().hash_blocks(a, salt).tolist(), hasher().hash_blocks(b, salt).tolist()
    for block, (hash_a, hash_b) in enumerate(zip(hashes_a, hashes_b, strict=False), start=1):
        assert (hash_a == hash_b) == (a[: 4 * block] == b[: 4 * block])


@given(st.integers(1, 20), int32)
def test_every_depth_has_a_hash_of_its_own(num_blocks: int, token: int) -> None:
    hashes = hasher().hash_blocks([token] * 4 * num_blocks).tolist()
    assert len(set(hashes)) == num_blocks


@given(salts, salts, st.lists(int32, min_size=4, max_size=4))
def test_salts_separate(first: str | None, second: str | None, block: list[int]) -> None:
    equal = hasher().hash_blocks(block, first).tolist() == hasher().hash_blocks(block, second).tolist()
    assert equal == (first == second)


def test_keys_separate_and_do_not_depend_on_what_was_hashed_before() -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, 40_000, dtype=np.int32)
    grown = hasher()
    long = grown.hash_blocks(tokens)
    short = grown.hash_blocks(tokens[:400])
    assert short.tolist() == hasher().hash_blocks(tokens[:400]).tolist() == long[:100].tolist()
    assert RoutingHasher(bytes(16), 4).hash_blocks(tokens[:400]).tolist() != short.tolist()


def test_thue_morse_inputs_do_not_collide() -> None:
    """These collide under every polynomial hash mod 2^64."""
    word = [bin(i).count("1") % 2 for i in range(1 << 11)]
    inverse = [1 - bit for bit in word]
    assert RoutingHasher(KEY, 1 << 11).hash_blocks(word) != RoutingHasher(KEY, 1 << 11).hash_blocks(inverse)


def test_no_collision_among_a_million_near_relatives() -> None:
    """Prompts that differ in a few high bits only: the hardest input of a multilinear hash."""
    tokens = np.random.default_rng(1).integers(0, 16, 4_000_000, dtype=np.int32) << 13
    assert len(np.unique(hasher().hash_blocks(tokens))) == 1_000_000
    assert len({mix(value << 40) for value in range(10_000)}) == 10_000


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_an_id_beyond_int32_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        hasher().hash_blocks([token] * 4)


def test_bad_parameters_are_named() -> None:
    with pytest.raises(ValueError, match="3 bytes"):
        RoutingHasher(b"abc", 16)
    with pytest.raises(ValueError, match="block_size is 0"):
        RoutingHasher(KEY, 0)
    with pytest.raises(ValueError, match="block of 4 tokens, got 3"):
        hasher().extend(HashState(0, 0), [1, 2, 3])
