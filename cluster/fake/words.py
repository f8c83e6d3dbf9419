"""Tokens that are words: whatever they are strung to is text."""

from __future__ import annotations

import re
from pathlib import Path

from ..api.text.processor import TextProcessor

_WORD = re.compile(r" [a-z]{2,9}")
MOST_WORDS = 1_000


def words_of(folder: Path) -> dict[str, int]:
    """Text → token id of the first ``MOST_WORDS`` of the vocabulary of the model in ``folder``. Takes a second."""
    text = TextProcessor.load(folder)
    texts = {text.token_bytes.text(token_id): token_id for token_id in range(text.vocab_size)}
    text.close()
    found = {text: token_id for text, token_id in texts.items() if _WORD.fullmatch(text)}
    return dict(list(found.items())[:MOST_WORDS])
