"""Workload: an endless or finite row of scripts. The same words and seed give the same scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .scripts import Script, Turn
from .words import Words


class Workload(Protocol):
    @property
    def num_scripts(self) -> int | None:
        """None where there is no end."""
        ...

    @property
    def has_arrivals(self) -> bool:
        """Whether scripts say when they came."""
        ...

    def scripts(self, words: Words, seed: int) -> Iterator[Script]: ...


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens: uniform from ``mean`` · (1 - ``ratio``) to ``mean`` · (1 + ``ratio``), and at least 1."""

    mean: int
    ratio: float = 0.0

    def draw(self, rng: np.random.Generator) -> int:
        least, most = math.floor(self.mean * (1.0 - self.ratio)), math.ceil(self.mean * (1.0 + self.ratio))
        return max(1, int(rng.integers(least, most + 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Scripts of ``num_turns``, each behind one of ``num_prefixes`` beginnings of ``prefix_len`` tokens.

    Each beginning is used equally often, in random order. With one turn these are shared system prompts, without a
    beginning random prompts; many turns of long inputs and short outputs are agents, whose inputs are what tools say.
    """

    num_prefixes: int
    prefix_len: int
    """0: none."""
    num_turns: int
    input_len: Length
    output_len: Length
    think_time_s: float
    """Mean of an exponential distribution: from an answer to the next turn."""

    @property
    def num_scripts(self) -> int | None:
        return None

    @property
    def has_arrivals(self) -> bool:
        return False

    def scripts(self, words: Words, seed: int) -> Iterator[Script]:
        rng = np.random.default_rng(seed)
        prefixes = [words.text(self.prefix_len, rng) if self.prefix_len else "" for _ in range(self.num_prefixes)]
        while True:
            for number in rng.permutation(self.num_prefixes).tolist():
                yield Script(prefixes[number], tuple([self._turn(turn, words, rng) for turn in range(self.num_turns)]))

    def _turn(self, number: int, words: Words, rng: np.random.Generator) -> Turn:
        pause_s = float(rng.exponential(self.think_time_s)) if number and self.think_time_s else 0.0
        return Turn(words.text(self.input_len.draw(rng), rng), self.output_len.draw(rng), pause_s)
