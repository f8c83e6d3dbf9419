"""Texts of a wanted number of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from octavo.cluster.load.words import ESTIMATED, Count, words_of


def counting(*, per_word: int) -> Count:
    async def of(text: str) -> int:
        return per_word * len(text.split())

    return of


@pytest.mark.parametrize("num_tokens", [1, 2, 31, 1_000])
async def test_lengths_are_exact_with_the_models_tokenizer(model_dir: Path, num_tokens: int) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    async def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    words = await words_of(count, "it")
    first, second = (words.text(num_tokens, np.random.default_rng(seed)) for seed in (1, 2))
    assert words.how == "exact, by it"
    assert await count(first) == await count(second) == num_tokens
    assert await count(f"{first} {second}") == 2 * num_tokens


async def test_words_that_are_no_single_token_are_left_out() -> None:
    async def count(text: str) -> int:
        return sum(2 if "o" in word else 1 for word in text.split())

    words = await words_of(count, "it")
    text = words.text(500, np.random.default_rng(0))
    assert "o" not in text
    assert len(set(text.split())) > 50


async def test_where_words_are_never_single_tokens_their_mean_is_the_estimate() -> None:
    words = await words_of(counting(per_word=3), "it")
    assert words.how == "estimated, 3.00 tokens a word by it"
    assert len(words.text(300, np.random.default_rng(0)).split()) == 100


def test_the_same_seed_gives_the_same_text_and_a_shorter_one_is_its_beginning() -> None:
    long, short = (ESTIMATED.text(length, np.random.default_rng(5)) for length in (64, 24))
    assert long.startswith(f"{short} ")
    assert long != ESTIMATED.text(64, np.random.default_rng(6))
