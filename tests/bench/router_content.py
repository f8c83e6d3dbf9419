"""What the benchmarks of the router put into an index and look up in it: the same tokens in every process.

Needs NumPy only: the peers' environments have nothing of Octavo. Tokens are random, so no two prompts share a block
unless one is made from the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK_SIZE = 16
LENGTHS = (512, 8192, 65536)
VOCABULARY_SIZE = 128_000
NUM_PARTIAL = 3

TokenArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Holding:
    """A group has the first ``num_blocks`` blocks of a prompt."""

    group: int
    prompt: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Query:
    tokens: TokenArray
    num_shared_blocks: int
    """How deep it follows a stored prompt, which one group holds whole: the right answer of a lookup."""


class Content:
    """Prompts of all ``LENGTHS``, ``num_entries`` blocks in all or a little more.

    Each prompt is held whole by one group and to random depths by three more, where there are so many.
    """

    def __init__(self, num_entries: int, num_groups: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.prompts: list[TokenArray] = []
        self.holdings: list[Holding] = []
        self.num_entries = 0
        while self.num_entries < num_entries:
            tokens = _tokens(rng, LENGTHS[len(self.prompts) % len(LENGTHS)])
            num_blocks = len(tokens) // BLOCK_SIZE
            groups = rng.permutation(num_groups)[: 1 + NUM_PARTIAL].tolist()
            depths = [num_blocks, *rng.integers(1, num_blocks, NUM_PARTIAL).tolist()]
            self.holdings += [Holding(g, len(self.prompts), d) for g, d in zip(groups, depths, strict=False)]
            self.prompts.append(tokens)
            self.num_entries += num_blocks

    @property
    def num_held_blocks(self) -> int:
        """Blocks of all groups together."""
        return sum([holding.num_blocks for holding in self.holdings])

    def held_out(self, length: int, count: int, seed: int) -> list[Query]:
        """Prompts of ``length`` tokens that leave a stored one after a random number of blocks, at least one."""
        rng = np.random.default_rng((seed, length))
        stored = [prompt for prompt in self.prompts if len(prompt) >= length]
        return list(self._leaving(rng, stored, length, count))

    @staticmethod
    def _leaving(rng: Any, stored: list[TokenArray], length: int, count: int) -> Iterator[Query]:
        for _ in range(count):
            prompt = stored[rng.integers(len(stored))]
            num_shared = int(rng.integers(1, length // BLOCK_SIZE))
            split = num_shared * BLOCK_SIZE
            yield Query(np.concatenate([prompt[:split], _tokens(rng, length - split)]), num_shared)


def text_of(tokens: TokenArray) -> str:
    """A character for each token, the shortest text that tells them apart: above the surrogates, which are none."""
    return (tokens + 0x10000).astype("<u4").tobytes().decode("utf-32-le")


def _tokens(rng: Any, count: int) -> TokenArray:
    tokens: TokenArray = rng.integers(0, VOCABULARY_SIZE, count).astype(np.int32)
    return tokens
