"""Silence: for how long one that owes an answer has said nothing, as far as that says something about it.

It is counted in looks, one each period. Whoever is stopped, or starved of its processor, looks late; as the other one
may then starve as well, a late look counts for little.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_LATE = 2.0
"""Periods after which a look is late."""
_LATE_SHARE = 0.1
"""Of a period, what a late look counts for: on a machine that is always late, silence is found ten times later."""


class Silence:
    """``limit_s`` of silence are too much, with a look each ``period_s``."""

    def __init__(self, limit_s: float, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._period_s = period_s
        self._clock = clock
        self._looked_at_s = clock()
        self._silent_s = 0.0

    def is_over(self) -> None:
        """It has said something, or owes nothing."""
        self._silent_s = 0.0
        self._looked_at_s = self._clock()

    def lasts_too_long(self) -> bool:
        """A look: nothing has come since the last one."""
        now = self._clock()
        is_late = now - self._looked_at_s > _LATE * self._period_s
        self._silent_s += self._period_s * (_LATE_SHARE if is_late else 1.0)
        self._looked_at_s = now
        return self._silent_s >= self._limit_s - 1e-9
