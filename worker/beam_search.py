"""Beam search: which continuations of a request go on after each step, and which outputs are complete.

Plain Python, without a clock. The engine runs the beams as sequences and asks the sampler for the likeliest tokens of
each; from these ``BeamSearch`` chooses.

A step ranks all continuations of all running beams by the log-probability of the whole output. The best ``beam_width``
of those that do not end with a stop token go on. Those that do end with one are complete outputs if they are among the
best ``beam_width`` of *all*; the best ``beam_width`` complete outputs of the whole search are kept. With the last of
``max_tokens`` tokens every continuation ends, so the best ``beam_width`` are complete, whatever their last token is.

The score of a complete output is log-probability / length ** ``length_penalty``; its length in tokens includes the stop
token. The search ends early when as many outputs as it keeps are complete and the best running beam, scored as if it
ended here, does not beat the worst of them; with ``early_stopping``, when so many are complete. For a positive
``length_penalty`` the first rule is a heuristic: a longer output could still have become better.

These are the rules of transformers 5 for ``num_beams`` without sampling, where ``tests/worker/test_beam_search.py``
compares the two. Sums are float64 here and float32 there, which shows in near-ties only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from .messages import FinishReason, SamplingParams
from .sampling_row import Candidate


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation that is computed in the next step."""

    parent: int
    """Index into the beams that the last call gave; 0, the prompt, in the first."""
    token_id: int
    log_probability: float
    """Of the whole output so far."""


@dataclass(frozen=True, slots=True)
class Output:
    """What the search found."""

    token_ids: tuple[int, ...]
    """After the prompt; with the stop token where ``reason`` is ``STOP``."""
    score: float
    reason: FinishReason | None
    """``STOP`` or ``LENGTH``. None: not complete, the search was left before, or no token could follow."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Path:
    """The tokens of an output, linked from the last to the first: beams share what they have in common."""

    before: _Path | None
    token_id: int


@dataclass(frozen=True, slots=True)
class _Running:
    path: _Path | None
    log_probability: float


@dataclass(frozen=True, slots=True)
class _Complete:
    path: _Path
    score: float
    reason: FinishReason


class BeamSearch:
    """The search of one request.

    ``min_tokens`` is kept by the sampler: until then no stop token is among the candidates. The gateway has judged the
    numbers; above all, ``max_tokens`` ** ±``length_penalty`` is finite.

    A step costs O((width + s) · log width), where s stop tokens rank before the last beam that is chosen.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        if sampling.beam_width is None:
            raise ValueError("beam_width is None: the tokens of this request are drawn, not searched")
        self._width = sampling.beam_width
        self._length_penalty = sampling.length_penalty
        self._early_stopping = sampling.early_stopping
        self._max_tokens = sampling.max_tokens
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._num_tokens = 0
        self._running: tuple[_Running, ...] = (_Running(path=None, log_probability=0.0),)
        self._complete: list[_Complete] = []
        """The best ``width``, best first; of equals the one found first."""

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest tokens of each beam are wanted. More of them would change nothing.

        So many have ``width`` tokens among them that do not stop. What follows in the row ranks after the
        continuations by these, so it is neither among the best ``width`` of all nor among those that go on.
        """
        return self._width + len(self._stop_token_ids)

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> tuple[Beam, ...]:
        """Take a step: the beams that go on, likeliest first. Without any the search is over.

        ``candidates`` has a row for each beam that the last call gave, in the same order, and one for the prompt in
        the first call; in a row the likeliest token comes first. Rows may be shorter than ``num_candidates``, or empty.
        Of equals the lower parent comes first, then the lower token id. Raises ValueError for another number of rows.
        """
        ranked = self._rank(candidates)
        best = list(islice(ranked, self._width))
        if not best:  # No token may follow. What runs is all there is to show.
            return ()
        self._num_tokens += 1
        self._keep_complete(best)
        going_on = self._choose(chain(best, ranked))
        self._running = tuple(self._follow(beam) for beam in going_on)
        return going_on

    def outputs(self, count: int) -> tuple[Output, ...]:
        """The best ``count``, best first, or as many as there are.

        Before the end (a timeout) those that still run come after the complete ones, with the tokens that they have.
        """
        complete = [Output(_token_ids(kept.path), kept.score, kept.reason) for kept in self._complete[:count]]
        running = [
            Output(_token_ids(beam.path), self._score(beam.log_probability), None)
            for beam in self._running[: count - len(complete)]
        ]
        return (*complete, *running)

    def _rank(self, candidates: Sequence[Sequence[Candidate]]) -> Iterator[Beam]:
        """All continuations, best first; lazily, since of width² only about the width is looked at."""
        rows = zip(self._running, candidates, strict=True)
        keyed = [_keys(parent, beam.log_probability, row) for parent, (beam, row) in enumerate(rows)]
        return (Beam(parent, token_id, -cost) for cost, parent, token_id in heapq.merge(*keyed))

    def _keep_complete(self, best: Sequence[Beam]) -> None:
        """``best`` are the best ``width`` continuations of the step: keep those that end if they are good enough."""
        for beam in best:
            reason = self._finish_reason(beam)
            if reason is not None:
                score = self._score(beam.log_probability)
                self._complete.append(_Complete(self._extend(beam), score, reason))
        self._complete.sort(key=lambda kept: -kept.score)
        del self._complete[self._width :]

    def _choose(self, ranked: Iterator[Beam]) -> tuple[Beam, ...]:
        if self._num_tokens >= self._max_tokens:  # None can: spare looking through all rows for one.
            return ()
        going_on = tuple(islice((beam for beam in ranked if self._finish_reason(beam) is None), self._width))
        return () if self._is_decided(going_on) else going_on

    def _is_decided(self, going_on: Sequence[Beam]) -> bool:
        """The complete outputs are taken to be the best that there are."""
        if not going_on or len(self._complete) < self._width:
            return False
        return self._early_stopping or self._score(going_on[0].log_probability) <= self._complete[-1].score

    def _finish_reason(self, beam: Beam) -> FinishReason | None:
        """Why the output ends with this token, which is its ``num_tokens``th; None when it does not."""
        if beam.token_id in self._stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._num_tokens >= self._max_tokens else None

    def _score(self, log_probability: float) -> float:
        """Of an output with as many tokens as the running ones have. One without any has the log-probability 0."""
        return log_probability / math.pow(max(self._num_tokens, 1), self._length_penalty)

    def _extend(self, beam: Beam) -> _Path:
        return _Path(self._running[beam.parent].path, beam.token_id)

    def _follow(self, beam: Beam) -> _Running:
        return _Running(self._extend(beam), beam.log_probability)


def _keys(parent: int, log_probability: float, row: Sequence[Candidate]) -> Iterator[tuple[float, int, int]]:
    """What continuations are ordered by, least first. A function, so that each row keeps its own arguments."""
    return ((-(log_probability + of_token), parent, token_id) for token_id, of_token in row)


def _token_ids(path: _Path | None) -> tuple[int, ...]:
    backwards = []
    while path is not None:
        backwards.append(path.token_id)
        path = path.before
    return tuple(reversed(backwards))
