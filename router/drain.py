"""Drain: how fast places come free."""

from __future__ import annotations

import math


class Drain:
    """How many requests end in a second while others wait for their places.

    Time in which nobody waits tells nothing: then as many end as come. Measured is the decayed number of ends over the
    decayed time of waiting; what the caller expects counts as ``PRIOR_S`` seconds of waiting, which decay too.
    """

    HORIZON_S = 30.0
    PRIOR_S = 5.0

    __slots__ = ("_busy_s", "_num_ended", "_prior_s", "_since")

    def __init__(self) -> None:
        self._num_ended = 0.0
        self._busy_s = 0.0
        self._prior_s = self.PRIOR_S
        self._since: float | None = None
        """Up to when time was counted; None while nobody waits."""

    def wait(self, now: float) -> None:
        """Somebody waits, from now on."""
        if self._since is None:
            self._since = now

    def rest(self, now: float) -> None:
        """Nobody waits any more."""
        self._pass(now)
        self._since = None

    def note_end(self, now: float) -> None:
        """A request has ended, its place is free."""
        if self._since is not None:
            self._pass(now)
            self._num_ended += 1.0

    def per_s(self, now: float, expected_per_s: float) -> float:
        """Ends per second; 0.0 is not known, as ``expected_per_s``."""
        self._pass(now)
        prior_s = self._prior_s if expected_per_s > 0.0 else 0.0
        weight_s = self._busy_s + prior_s
        return (self._num_ended + expected_per_s * prior_s) / weight_s if weight_s > 0.0 else 0.0

    def _pass(self, now: float) -> None:
        if self._since is not None and now > self._since:
            keep = math.exp((self._since - now) / self.HORIZON_S)
            self._num_ended *= keep
            self._prior_s *= keep
            self._busy_s = self._busy_s * keep + self.HORIZON_S * (1.0 - keep)
            self._since = now
