"""What tokens stand for: byte-level vocabularies, sentencepiece's, and others."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from octavo.cluster.api.text.processor import TextProcessor
from octavo.cluster.api.text.token_bytes import TokenBytes

MIXED = "안녕 🇰🇷👩‍👩‍👧 ok שלום 你好，世界 e\u0301 naïve\n\ttabs  and   blanks 🏳️‍🌈"


def test_the_bytes_of_a_text_are_those_of_its_tokens(text: TextProcessor) -> None:
    token_ids = text._backend.encode(MIXED).ids
    assert b"".join(text.token_bytes.all[token_id] for token_id in token_ids) == MIXED.encode()


def test_a_token_that_is_text_by_itself_is_that_text(text: TextProcessor) -> None:
    for token_id in range(49_152):
        assert text.token_bytes.text(token_id) == text.decode([token_id], skip_special_tokens=False)


def test_special_tokens_have_a_name_and_no_text(text: TextProcessor) -> None:
    assert text.token_bytes.text(2) == "<|im_end|>"
    assert text.token_bytes.without_special[2] == b""


def test_a_row_of_the_model_without_a_token_is_nothing(text: TextProcessor) -> None:
    assert (text.token_bytes.all[60_000], text.token_bytes.text(60_000)) == (b"", "")


@pytest.mark.parametrize(
    ("piece", "expected"), [("▁hello", b" hello"), ("<0xE2>", b"\xe2"), ("<s>", b"<s>"), ("a▁b", b"a b")]
)
def test_sentencepiece_vocabularies(piece: str, expected: bytes) -> None:
    vocab = {"<unk>": 0, "<s>": 1, "▁hello": 2, "<0xE2>": 3, "a▁b": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokens = TokenBytes(tokenizer)
    assert not tokens.is_byte_level
    assert tokens.all[vocab[piece]] == expected


def test_other_vocabularies_are_asked_token_by_token() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert TokenBytes(tokenizer).text(1) == "play"
