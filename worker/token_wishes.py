"""TokenWishes: what a request says of single tokens, in the form in which each step needs it; its branches share it.

Token ids beyond the vocabulary are passed over: they cannot be drawn anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from .messages import SamplingParams


def needs_state(sampling: SamplingParams) -> bool:
    """Whether tokens of the request are bent by more than temperature, top_k, top_p, min_p and min_tokens."""
    return bool(
        has_penalties(sampling)
        or sampling.logit_bias
        or sampling.allowed_token_ids is not None
        or sampling.bad_words
        or sampling.grammar is not None
    )


def has_penalties(sampling: SamplingParams) -> bool:
    return (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0)


class TokenWishes:
    """Does not change, but for arrays that are made when they are first asked for."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling
        self.has_penalties = has_penalties(sampling)
        self.look_back = max([len(word) - 1 for word in sampling.bad_words], default=0)
        """How many of the last tokens of prompt and output matter."""
        self._always_banned = {word[0] for word in sampling.bad_words if len(word) == 1}
        self._endings: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        """Token → (tokens that end with it, the one that cannot follow them)."""
        for word in sampling.bad_words:
            if len(word) > 1:
                self._endings[word[-2]].append((list(word[:-1]), word[-1]))
        self._bias: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
        self._allowed: NDArray[np.int32] | None = None

    def bias(self, vocab_size: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Token ids and what is added to their logits."""
        if self._bias is None:
            pairs = [(token, value) for token, value in self.sampling.logit_bias if 0 <= token < vocab_size]
            token_ids, values = zip(*pairs, strict=True) if pairs else ((), ())
            self._bias = np.array(token_ids, np.int32), np.array(values, np.float32)
        return self._bias

    def banned_after(self, last_tokens: list[int]) -> Collection[int]:
        """Tokens that would complete a bad word after these ``look_back`` ones, or fewer where there are none."""
        endings = self._endings.get(last_tokens[-1]) if last_tokens else None
        if not endings:
            return self._always_banned
        return self._always_banned | {last for before, last in endings if last_tokens[-len(before) :] == before}

    def restrict(self, row: NDArray[np.int32], vocab_size: int, *, replace: bool) -> None:
        """Leave only the bits of ``allowed_token_ids`` in a mask; ``replace``: whatever is in it."""
        if self.sampling.allowed_token_ids is None:
            return
        if self._allowed is None:
            self._allowed = _bits(self.sampling.allowed_token_ids, vocab_size)
        if replace:
            row[:] = self._allowed
        else:
            row &= self._allowed

    def restricting_fields(self, position: int) -> list[str]:
        """The fields that may have excluded tokens as the output token at ``position``."""
        sampling = self.sampling
        restricts = {
            "allowed_token_ids": sampling.allowed_token_ids is not None,
            "grammar": sampling.grammar is not None,
            "bad_words": bool(sampling.bad_words),
            "min_tokens": position < sampling.min_tokens and bool(sampling.stop_token_ids),
        }
        return [field for field, does in restricts.items() if does]


def _bits(token_ids: Collection[int], vocab_size: int) -> NDArray[np.int32]:
    """[ceil(vocabulary / 32)]"""
    is_set = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    ids = np.array(token_ids, np.int64)
    is_set[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return np.packbits(is_set, bitorder="little").view(np.int32)
