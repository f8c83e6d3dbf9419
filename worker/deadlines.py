"""Deadlines: finds sequences that are late without looking at all of them in every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from .messages import Request
from .sequence import Sequence


class Deadlines:
    """``is_queued(request)``: nothing of it was admitted yet, so that its time in the queue still runs."""

    def __init__(self, is_queued: Callable[[Request], bool]) -> None:
        self._is_queued = is_queued
        self._next_s = math.inf
        """Nobody is late before this time."""

    def add(self, sequences: Iterable[Sequence]) -> None:
        """New sequences. Forks of those known have the same deadlines."""
        self._next_s = min([self._next_s, *_all(sequences)])

    def is_due(self, now: float) -> bool:
        """Whether ``late`` must be asked."""
        return now >= self._next_s

    def late(self, sequences: list[Sequence], now: float) -> list[Sequence]:
        """Those of all ``sequences`` there are whose time is over."""
        self._next_s = min((time for time in _all(sequences) if time > now), default=math.inf)
        return [
            sequence for sequence in sequences if self.is_late(sequence, now) or self.queued_too_long(sequence, now)
        ]

    def is_late(self, sequence: Sequence, now: float) -> bool:
        return sequence.deadline_s is not None and sequence.deadline_s <= now

    def queued_too_long(self, sequence: Sequence, now: float) -> bool:
        deadline_s = sequence.queue_deadline_s
        return deadline_s is not None and deadline_s <= now and self._is_queued(sequence.request)

    def check(self, sequences: list[Sequence]) -> None:
        """Prove that nobody would be late unnoticed. Raises RuntimeError."""
        due = [sequence.deadline_s for sequence in sequences]
        due += [sequence.queue_deadline_s for sequence in sequences if self._is_queued(sequence.request)]
        if any(time < self._next_s for time in due if time is not None):
            raise RuntimeError("a deadline would be missed")


def _all(sequences: Iterable[Sequence]) -> Iterator[float]:
    for sequence in sequences:
        if sequence.deadline_s is not None:
            yield sequence.deadline_s
        if sequence.queue_deadline_s is not None:
            yield sequence.queue_deadline_s
