"""Text of a wanted number of tokens, made of common words that are one token each.

Tokenizers split before a space, so a text of k such words is k tokens, and so are two texts joined by a space. Which
words are single tokens is asked of whoever can count: the server, or a tokenizer on disk. Lengths are those of the
text; special tokens and chat templates come on top, and the server's usage says how many there were in all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import numpy as np

Count: TypeAlias = Callable[[str], Awaitable[int]]
"""Tokens of a text, without special ones."""

_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work number night point home water room mother area money
story fact month right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city name team minute idea body back face level office door health person art
war history party result change morning reason research girl moment air force order paper space ground form event
tree river road sea field summer winter light sound music color picture table window wall bed bridge stone gold
iron wood glass fire snow rain wind star moon sun earth horse dog cat bird fish food bread milk tea coffee sugar
salt oil cup box key ring ball boat ship train plane farm garden market shop store bank church town village
street park hill mountain lake island beach forest north south east west red blue green black white long short
high low large small great little old new young early late first last next best good bad hard soft warm cold
fast slow open close full clear dark deep strong simple common public local human natural social real true
"""
_CANDIDATES = tuple(_TEXT.split())
_NUM_OPENERS = 8
_FEWEST = 32
_TRIAL_TOKENS = 256


class Words:
    """``openers`` are single tokens at the start of a text too."""

    def __init__(
        self,
        how: str,
        words: Sequence[str] = _CANDIDATES,
        openers: Sequence[str] = _CANDIDATES,
        tokens_per_word: float = 1.0,
    ) -> None:
        self.how = how
        """How lengths come about, for the report."""
        self._words = list(words)
        self._openers = list(openers)
        self._tokens_per_word = tokens_per_word

    def text(self, num_tokens: int, rng: np.random.Generator) -> str:
        """``num_tokens`` ≥ 1; the same ``rng`` gives the same text."""
        num_words = max(1, round(num_tokens / self._tokens_per_word))
        first, *rest = rng.integers(2**62, size=num_words).tolist()
        opener = self._openers[first % len(self._openers)]
        return " ".join([opener, *[self._words[number % len(self._words)] for number in rest]])


ESTIMATED = Words("estimated, a token a word")


async def words_of(count: Count, source: str) -> Words:
    """Exact where this tokenizer has enough words of one token; else by its measured tokens a word, and said so."""
    openers = [word for word in _CANDIDATES[: 4 * _NUM_OPENERS] if await count(word) == 1][:_NUM_OPENERS]
    if openers:
        words = await _single(count, openers[0], list(_CANDIDATES))
        exact = Words(f"exact, by {source}", words, openers)
        if len(words) >= _FEWEST and await count(_trial(exact)) == _TRIAL_TOKENS:
            return exact
    tokens_per_word = await count(_trial(ESTIMATED)) / _TRIAL_TOKENS
    return Words(f"estimated, {tokens_per_word:.2f} tokens a word by {source}", tokens_per_word=tokens_per_word)


async def _single(count: Count, opener: str, words: list[str]) -> list[str]:
    """Those that are one token after another word. Halves that are right as a whole are not looked at in parts."""
    if await count(" ".join([opener, *words])) == 1 + len(words):
        return words
    if len(words) == 1:
        return []
    middle = len(words) // 2
    return await _single(count, opener, words[:middle]) + await _single(count, opener, words[middle:])


def _trial(words: Words) -> str:
    return words.text(_TRIAL_TOKENS, np.random.default_rng(0))
