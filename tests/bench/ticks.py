"""A clock that all processes of a machine share, and a word for each of its ticks.

What gives a token at a tick gives the tick's word, so that whoever reads the text knows when it was given.
"""

from __future__ import annotations

import time

from octavo.cluster.fake.words import MOST_WORDS

PERIOD_S = 0.020
NUM_WORDS = MOST_WORDS
"""A word comes again after so many ticks, 20 s."""


def next_tick(after: int) -> int:
    """The first tick that is later than ``after`` and yet to come."""
    return max(after, int(time.monotonic() / PERIOD_S)) + 1


def wait_s(tick: int) -> float:
    """From now until then."""
    return max(0.0, tick * PERIOD_S - time.monotonic())


def delay_s(word: int, arrival_s: float) -> float:
    """Between the tick that has this word and ``arrival_s``, on the monotonic clock: the tick closest to it, since a
    timer may run out a little early."""
    cycle_s = NUM_WORDS * PERIOD_S
    return (arrival_s - word * PERIOD_S + 1.0) % cycle_s - 1.0
