"""A simulated group on the clock: woken when a step is over, heard when it has news.

It reports like ``worker/reporter.py``: at once when there is news, but not before a pause after the last report was
answered, and every second in any case. The answers travel in no time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ...worker.messages import GroupReport, Request
from .clock import Clock, Rank
from .faults import EventChannel
from .group import SimulatedGroup


@dataclass(frozen=True, slots=True)
class Reporting:
    """How reports travel, in seconds."""

    delay_s: float
    """From a group until the router has it."""
    pause_s: float
    """Between the answer to a report and the next one."""
    period_s: float
    """A group reports at least so often."""
    blocks_pause_s: float
    """As ``pause_s``, for a report that is only of blocks which running requests have filled."""


class Line:
    """``deliver(report)`` gives a report to the router and returns whether it wants a snapshot."""

    def __init__(
        self,
        group: SimulatedGroup,
        clock: Clock,
        reporting: Reporting,
        channel: EventChannel,
        deliver: Callable[[GroupReport], bool],
    ) -> None:
        self.group = group
        self.is_dead = False
        """Nothing is computed there any more; a report on its way still arrives."""
        self._clock = clock
        self._reporting = reporting
        self._channel = channel
        self._deliver = deliver
        self._wakes_at_s: float | None = None
        self._reports_at_s: float | None = None
        self._earliest_report_s = self._earliest_blocks_s = clock.now
        self._due_s = clock.now
        self._is_reporting = False

    def introduce(self) -> None:
        """Let the router know the group from this moment on."""
        self._arrive(self.group.take_report(self._clock.now))

    def submit(self, request: Request) -> None:
        self.group.submit(request, self._clock.now)
        self._follow()

    def die(self) -> list[str]:
        """The ids of the requests that are lost there."""
        self.is_dead = True
        return self.group.end(self._clock.now)

    # ---- steps ----

    def _follow(self) -> None:
        """Something has happened to the group: see to it that it is woken, and heard, in time."""
        time_s = self.group.wakes_at_s
        if time_s is not None and time_s != self._wakes_at_s:
            self._wakes_at_s = time_s
            self._clock.at(time_s, Rank.STEP, self._wake)
        self._plan_report()

    def _wake(self) -> None:
        if self._wakes_at_s == self.group.wakes_at_s == self._clock.now and not self.is_dead:
            self._wakes_at_s = None
            self.group.wake()
            self._follow()

    # ---- reports ----

    def _plan_report(self) -> None:
        planned_s = self._reports_at_s
        if self._is_reporting or self.is_dead or (planned_s is not None and planned_s <= self._earliest_report_s):
            return
        due_s = self._report_due_s()
        if planned_s is None or due_s < planned_s:
            self._reports_at_s = due_s
            self._clock.at(due_s, Rank.REPORT, self._report)

    def _report_due_s(self) -> float:
        news_s = self.group.has_news_at_s(self._clock.now)
        if news_s is not None and not self.group.has_urgent_news:
            news_s = max(news_s, self._earliest_blocks_s)
        return max(self._due_s if news_s is None else min(news_s, self._due_s), self._earliest_report_s)

    def _report(self) -> None:
        now = self._clock.now
        if self._reports_at_s != now or self._is_reporting or self.is_dead:
            return
        self._reports_at_s = None
        report = self.group.take_report(now)
        if self._report_due_s() > now:  # the news that was expected did not come, since a request did
            self._plan_report()
            return
        self._is_reporting = True
        if now >= self._due_s:
            self._due_s = now + self._reporting.period_s
        self._clock.at(now + self._reporting.delay_s, Rank.DELIVERY, functools.partial(self._arrive, report))

    def _arrive(self, report: GroupReport) -> None:
        now = self._clock.now
        wants_snapshot = self._deliver(self._channel.carry(report))
        if self.is_dead:
            return
        self.group.report_arrived(report, wants_snapshot=wants_snapshot, now=now)
        self._is_reporting = False
        self._earliest_report_s = now + self._reporting.pause_s
        self._earliest_blocks_s = now + self._reporting.blocks_pause_s
        self._plan_report()
