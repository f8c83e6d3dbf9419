"""Pace: how soon a page may ask again, so that any number of open pages costs a gateway no more than a few."""

from __future__ import annotations

PERIOD_S = 1.0
"""What a page shows is as new as that."""
GAP_S = 0.05
"""Between two answers, once there are more pages than this allows to ask in every period."""


class Pace:
    """Each page that asks is given the next free moment to come back at."""

    def __init__(self, period_s: float = PERIOD_S, gap_s: float = GAP_S) -> None:
        self.period_s = period_s
        self._gap_s = gap_s
        self._last_s = float("-inf")
        """The latest moment that was given."""

    def next_s(self, now: float) -> float:
        """Seconds from ``now`` on."""
        self._last_s = max(now + self.period_s, self._last_s + self._gap_s)
        return self._last_s - now
