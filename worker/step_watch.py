"""StepWatch: how long the engine's thread may take to come round before its group is taken for hung.

It is for ranks that wait for each other for ever (a collective that one of them never entered, a GPU that has stopped):
all their processes still answer. One that does not answer at all is noticed sooner, by its worker group.
"""

from __future__ import annotations

FIRST_STEPS = 100
FIRST_DEADLINE_S = 600.0
"""In the first steps kernels are compiled, and nothing is known of the speed."""

LEAST_DEADLINE_S = 60.0
"""Also later a step may have to compile a kernel that none before it used, which takes seconds for each."""

TIMES_SLOWEST = 10.0
"""A step that takes so many times what the slowest before it took, or the largest one should take, does not end."""

_KEEP = 0.999
"""Of the slowest round, with each further one: about the last thousand count."""


class StepWatch:
    """Times are given, in seconds of one clock. ``deadline_s`` None: from what steps take."""

    def __init__(self, now: float, deadline_s: float | None = None) -> None:
        self._given_s = deadline_s
        self._since_s = now
        self._slowest_s = 0.0
        self._largest_step_s = 0.0
        self._num_steps = 0

    def came_round(self, now: float) -> None:
        """The thread has ended a round, and begins the next one."""
        self._slowest_s = max(now - self._since_s, _KEEP * self._slowest_s)
        self._since_s = now

    def note_step(self, largest_step_s: float = 0.0) -> None:
        """A step was carried out in this round. ``largest_step_s``: what the largest one is expected to take by now,
        0.0 when unknown."""
        self._largest_step_s = largest_step_s
        self._num_steps += 1

    def age_s(self, now: float) -> float:
        """Of the round under way."""
        return now - self._since_s

    @property
    def deadline_s(self) -> float:
        """What a round may take."""
        if self._given_s is not None:
            return self._given_s
        if self._num_steps < FIRST_STEPS:
            return FIRST_DEADLINE_S
        return max(LEAST_DEADLINE_S, TIMES_SLOWEST * max(self._slowest_s, self._largest_step_s))
