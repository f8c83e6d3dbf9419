"""A trace as a workload: prompts that begin alike as far as the trace's block ids do, at the times that it says."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...router.simulator.traces import Trace, TraceRequest
from .scripts import Script, Turn
from .words import Words

_NUM_KEPT_BLOCKS = 4_096
_OWN = 2**32
"""Beyond all block ids: what a request has for itself."""


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """``length_scale`` multiplies all lengths, and the blocks with them: the shares that prompts have in common stay.
    ``output_len`` takes the place of the recorded ones."""

    trace: Trace
    length_scale: float = 1.0
    output_len: int | None = None

    @property
    def num_scripts(self) -> int | None:
        return len(self.trace.requests)

    @property
    def has_arrivals(self) -> bool:
        return True

    def scripts(self, words: Words, seed: int) -> Iterator[Script]:
        size = self._scaled(self.trace.block_size)

        @functools.lru_cache(_NUM_KEPT_BLOCKS)
        def block(block_id: int) -> str:
            return words.text(size, np.random.default_rng((seed, block_id)))

        for number, request in enumerate(self.trace.requests):
            num_tokens = self._scaled(request.num_prompt_tokens)
            pieces = [block(block_id) for block_id in request.block_ids[: num_tokens // size]]
            rng = self._rest_rng(request, num_tokens // size, seed, number)
            if rest := num_tokens - size * len(pieces):
                pieces.append(words.text(rest, rng))
            output_len = self.output_len or self._scaled(request.num_output_tokens)
            yield Script(
                "", (Turn(" ".join(pieces), output_len),), request.arrival_s - self.trace.requests[0].arrival_s
            )

    def _scaled(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * self.length_scale))

    def _rest_rng(self, request: TraceRequest, num_full: int, seed: int, number: int) -> np.random.Generator:
        """Of a block that is cut short, as of the whole one; of what no id stands for, the request's own."""
        source = request.block_ids[num_full] if num_full < len(request.block_ids) else _OWN + number
        return np.random.default_rng((seed, source))
