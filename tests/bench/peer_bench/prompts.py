"""Prompts of an exact length in tokens that are the same as text and as token ids."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

QUESTIONS = Path(__file__).parents[2] / "data" / "prompts.json"
WORD = re.compile(r"Ġ[a-z]{3,}")
"""In the spelling of byte-level vocabularies: a space and letters, which no tokenizer joins to its neighbours."""


@dataclass(frozen=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str


class Vocabulary:
    """A tokenizer and its words that are one token each."""

    def __init__(self, model_dir: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        words = sorted(word for word in self.tokenizer.get_vocab() if WORD.fullmatch(word))
        found = self.tokenizer.encode_batch([word.replace("Ġ", " ") for word in words])
        self.words = [encoding.ids[0] for encoding in found if len(encoding.ids) == 1]

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text).ids)


class Prompts:
    """Of random words. The same ``seed`` gives the same prompts in the same order."""

    def __init__(self, vocabulary: Vocabulary, seed: str) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(seed)

    def words(self, num_tokens: int, *, after: Prompt | None = None) -> Prompt:
        """``num_tokens`` words, following those of ``after``."""
        begin = () if after is None else after.token_ids
        token_ids = (*begin, *self._random.choices(self._vocabulary.words, k=num_tokens))
        return Prompt(token_ids, self._vocabulary.tokenizer.decode(list(token_ids)))


def questions(vocabulary: Vocabulary, count: int) -> list[Prompt]:
    """The first of the test prompts, as they stand."""
    texts = json.loads(QUESTIONS.read_text())["prompts"][:count]
    return [Prompt(vocabulary.encode(text), text) for text in texts]
