"""A virtual clock: what is due comes in the order of its time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum


class Rank(IntEnum):
    """Who comes first of those at the same time: what a step gave is known to whatever asks at its end."""

    STEP = 0
    DELIVERY = 1
    SUBMISSION = 2
    REPORT = 3
    ARRIVAL = 4


class Clock:
    """``now`` in seconds. Of equal time and rank, what was put in first comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, int, Callable[[], None]]] = []
        self._num_put = 0

    def __len__(self) -> int:
        return len(self._due)

    def at(self, time_s: float, rank: Rank, call: Callable[[], None]) -> None:
        """Let ``call()`` come at ``time_s``. Raises ValueError when that has passed."""
        if not time_s >= self.now:
            raise ValueError(f"it is {self.now} s already; nothing can come at {time_s} s")
        heapq.heappush(self._due, (time_s, rank, self._num_put, call))
        self._num_put += 1

    def advance(self) -> None:
        """To what is due next, and do it. There is something."""
        self.now, _, _, call = heapq.heappop(self._due)
        call()
