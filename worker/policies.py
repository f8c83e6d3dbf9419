"""Policies of the scheduler: who is served first, and who gives way when memory runs out.

A policy is an object with one question to answer. The scheduler's loop asks; it does not know which policy it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from .sequence import Sequence


class Order(Protocol):
    def key(self, sequence: Sequence) -> tuple[float, ...]:
        """Waiting sequences are admitted in ascending order of this key, which must not change while one waits."""
        ...


class Victim(Protocol):
    def choose(self, running: Iterable[Sequence]) -> Sequence:
        """The running sequence to preempt. ``running`` is not empty."""
        ...


class PriorityOrder:
    """Lower priority value first, then first come."""

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.request.priority, sequence.arrival)


class LeastWorkLost:
    """The least urgent priority, in it the sequence with the fewest tokens to compute again, in a tie the latest.

    What is shared with others, or was taken from the cache, is likely to be found again and does not count as lost.
    """

    def choose(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=self._key)

    @staticmethod
    def _key(sequence: Sequence) -> tuple[int, int, int]:
        num_lost = sequence.num_computed_tokens - (sequence.num_cached_tokens or 0)
        return sequence.request.priority, -num_lost, sequence.arrival
