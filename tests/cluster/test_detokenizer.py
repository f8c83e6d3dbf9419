"""Detokenizer: the pieces are the whole, and no piece ends inside a character."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from octavo.cluster.api.text.detokenizer import REPLACEMENT, Detokenizer, WindowDetokenizer
from octavo.cluster.api.text.processor import TextProcessor

MIXED = "안녕 🇰🇷👩‍👩‍👧 ok שלום 你好，世界 e\u0301 naïve\n\ttabs  and   blanks 🏳️‍🌈"
LETTERS = ["▁hello", "▁world", "▁", "a", "b", "."]


any_tokens = st.lists(st.integers(0, 49_251) | st.integers(0, 16), max_size=40)


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    """A tokenizer as sentencepiece models have it: a blank is ▁, unknown characters are byte tokens."""
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    vocab |= {piece: 258 + index for index, piece in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def pieces(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


def fallback_ids(word: str) -> list[int]:
    return [258 + LETTERS.index(word)] if word in LETTERS else [byte + 2 for byte in word.encode()]


@given(token_ids=any_tokens, skip=st.booleans())
def test_any_tokens_give_the_text_of_the_whole_sequence(text: TextProcessor, token_ids: list[int], skip: bool) -> None:
    """Special ones and rows of the model without a token among them."""
    parts = pieces(text.detokenizer((), skip_special_tokens=skip), token_ids)
    assert "".join(parts) == text.decode(token_ids, skip_special_tokens=skip)


@given(token_ids=any_tokens)
def test_both_ways_to_detokenize_agree(text: TextProcessor, token_ids: list[int]) -> None:
    bytewise, windowed = text.detokenizer(()), WindowDetokenizer(text.decode)
    assert "".join(pieces(bytewise, token_ids)) == "".join(pieces(windowed, token_ids))


@given(answer=st.text(max_size=60), prompt=st.text(max_size=20))
def test_no_piece_ends_inside_a_character(text: TextProcessor, answer: str, prompt: str) -> None:
    encode = text._backend.encode
    answer = text.decode(encode(answer).ids)  # the vocabulary lacks a few bytes
    assume(REPLACEMENT not in answer)
    parts = pieces(text.detokenizer(encode(prompt).ids), encode(answer).ids)
    assert "".join(parts) == answer
    assert not any(REPLACEMENT in part for part in parts)


def test_case_bug_025_characters_that_span_tokens(text: TextProcessor) -> None:
    token_ids = text._backend.encode(MIXED).ids
    parts = pieces(text.detokenizer(()), token_ids)
    assert "".join(parts) == MIXED
    assert parts[-1] == ""
    assert not any(REPLACEMENT in part for part in parts)


def test_whole_characters_before_a_half_one_are_sent_at_once(text: TextProcessor) -> None:
    blank_and_half = next(i for i in range(49_152) if text.decode([i]) == f" {REPLACEMENT}")
    detokenizer = text.detokenizer(())
    assert detokenizer.push(blank_and_half) == " "


def test_flush_gives_what_can_no_longer_be_completed(text: TextProcessor) -> None:
    half = text._backend.encode("👩").ids[:1]
    detokenizer = text.detokenizer(())
    assert [detokenizer.push(half[0]), detokenizer.flush()] == ["", REPLACEMENT]


def test_case_bug_049_text_goes_on_after_special_tokens(text: TextProcessor) -> None:
    hello, world = text._backend.encode("Hello").ids, text._backend.encode(" world").ids
    assert "".join(pieces(text.detokenizer(()), [*hello, 1, 2, *([2] * 40), *world])) == "Hello world"


def test_a_genuine_replacement_character_in_prompt_and_output_is_text(text: TextProcessor) -> None:
    encode = text._backend.encode
    detokenizer = text.detokenizer(encode(f"a{REPLACEMENT}").ids)
    assert "".join(pieces(detokenizer, encode(f"b{REPLACEMENT}c").ids)) == f"b{REPLACEMENT}c"


def test_endless_undecodable_bytes_do_not_wait_for_ever(text: TextProcessor) -> None:
    half = text._backend.encode("👩").ids[0]
    parts = pieces(text.detokenizer(()), [half] * 200)
    assert "".join(parts) == text.decode([half] * 200)
    assert sum(map(len, parts[:100])) > 50


@given(words=st.lists(st.sampled_from([*LETTERS, "안", "👩", "é", "你"]), max_size=30))
def test_byte_fallback_vocabularies(fallback: Tokenizer, words: list[str]) -> None:
    token_ids = [token_id for word in words for token_id in fallback_ids(word)]
    text = "".join(pieces(WindowDetokenizer(fallback.decode, [258 + LETTERS.index("a")]), token_ids))
    assert text == "".join(words).replace("▁", " ")


@given(token_ids=st.lists(st.integers(2, 257), max_size=60))
def test_bytes_that_are_no_utf8_are_never_taken_back(fallback: Tokenizer, token_ids: list[int]) -> None:
    detokenizer = WindowDetokenizer(fallback.decode)
    assert all(isinstance(part, str) for part in pieces(detokenizer, token_ids))


def test_the_first_token_keeps_its_blank_after_a_prompt(fallback: Tokenizer) -> None:
    hello, world = 258, 259
    assert "".join(pieces(WindowDetokenizer(fallback.decode, [hello]), [world])) == " world"
    assert "".join(pieces(WindowDetokenizer(fallback.decode), [world])) == "world"
