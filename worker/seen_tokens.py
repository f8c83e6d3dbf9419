"""SeenTokens: which tokens a sequence holds and how often its output does, for penalties."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


class SeenTokens:
    """Distinct tokens and their counts, side by side: first those of the prompt, in order of their ids, then what the
    output has beside them, as it came. A new token costs a search among those of the prompt at the most."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        """The prompt's tokens count as seen, 0 times in the output."""
        token_ids = np.frombuffer(array("i", prompt_token_ids), np.int32)
        prompt = np.flatnonzero(np.bincount(token_ids)).astype(np.int32)  # in a tenth of the time of a sort
        self._set(prompt, np.zeros(len(prompt), np.int32), len(prompt), len(prompt), {})

    def _set(self, tokens: Int32s, counts: Int32s, size: int, num_prompt: int, places: dict[int, int]) -> None:
        self._tokens, self._counts, self._size = tokens, counts, size
        """The arrays may be longer than ``size``: they double when they are full."""
        self._num_prompt = num_prompt
        self._places = places
        """Of the tokens in the output."""

    @property
    def tokens(self) -> Int32s:
        """[N], no id twice. A view, good until the next ``add``."""
        return self._tokens[: self._size]

    @property
    def counts(self) -> Int32s:
        """[N]: how often each is in the output."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """One more token of the output."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = self._find(token_id)
        self._counts[place] += 1

    def fork(self) -> SeenTokens:
        fork = SeenTokens.__new__(SeenTokens)
        fork._set(self.tokens.copy(), self.counts.copy(), self._size, self._num_prompt, self._places.copy())
        return fork

    def _find(self, token_id: int) -> int:
        """The place of a token that is new to the output."""
        place = int(self._tokens[: self._num_prompt].searchsorted(token_id))
        if place < self._num_prompt and self._tokens[place] == token_id:
            return place
        return self._append(token_id)

    def _append(self, token_id: int) -> int:
        if self._size == len(self._tokens):
            room = np.zeros(max(16, self._size), np.int32)
            self._tokens, self._counts = np.append(self._tokens, room), np.append(self._counts, room)
        self._tokens[self._size] = token_id
        self._size += 1
        return self._size - 1
