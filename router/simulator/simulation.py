"""One policy, one trace, one cluster, under a virtual clock.

    trace ── arrival ──▶ policy.route ── submit_delay ──▶ group: engine, step by step
                            ▲                               │
                            └──────── report_delay ─────────┘   reports as a leader sends them

A group reports like ``worker/actor.py``: at once when there is news, but not before a pause after the last report was
answered, and every second in any case. Nothing is sent, lost or late beyond the delays; the answers travel in no time.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ...worker.errors import ConfigurationError
from ...worker.messages import GroupReport, Request, RouteQuery
from ...worker.routing_hash import RoutingHasher
from .clock import Clock, Rank
from .group import GroupConfig, SimulatedGroup
from .metrics import Result, Results
from .policies import Policy, make_policy
from .prompts import Prompts
from .traces import Trace

_HASH_KEY = b"octavo simulates"


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """Of a cluster whose groups are all alike."""

    num_groups: int
    group: GroupConfig
    submit_delay_s: float = 0.002
    """From the arrival of a request until its group has it."""
    report_delay_s: float = 0.010
    """From a group until the router has it."""
    report_pause_s: float = 0.010
    """Between the answer to a report and the next one."""
    report_period_s: float = 1.0
    """A group reports at least so often."""
    seed: int = 0

    def check(self, trace: Trace) -> None:
        """Raises ConfigurationError when a request could never be served."""
        size = self.group.block_size
        for number, request in enumerate(trace.requests, 1):
            num_tokens = request.num_prompt_tokens + request.num_output_tokens
            if -(-num_tokens // size) > self.group.num_blocks:
                raise ConfigurationError(
                    f"--kv-tokens: request {number} of {trace.name} has {num_tokens} tokens,"
                    f" but a group has room for {self.group.num_blocks * size}"
                )


@dataclass(slots=True)
class _Line:
    """A group, and what the clock knows of it."""

    group: SimulatedGroup
    wakes_at_s: float | None = None
    reports_at_s: float | None = None
    earliest_report_s: float = 0.0
    due_s: float = 0.0
    is_reporting: bool = False


class Simulation:
    """``on_finished()`` is called whenever a request has ended."""

    def __init__(self, config: SimulationConfig, trace: Trace, policy: str, on_finished: Callable[[], None]) -> None:
        config.check(trace)
        self._config = config
        self._trace = trace
        self._clock = Clock()
        names = [f"group-{number}" for number in range(config.num_groups)]
        self.policy: Policy = make_policy(policy, names, random.Random(config.seed))
        hasher = RoutingHasher(_HASH_KEY, config.group.block_size)
        self._prompts = Prompts(hasher, trace.block_size)
        self._results = Results(trace, names, config.group.block_size, on_finished)
        self.lines = {
            name: _Line(
                SimulatedGroup(name, config.group, hasher, self._results.note_update, self._results.note_coasted)
            )
            for name in names
        }

    def run(self) -> Result:
        """All of the trace, until the last request has ended."""
        for _ in self.steps():
            pass
        return self._results.summary([line.group for line in self.lines.values()], self._clock.now)

    def steps(self) -> Iterator[float]:
        """The same, piece by piece; gives the time after each."""
        for line in self.lines.values():
            self._deliver(line, line.group.take_report(0.0))
        self._expect(0)
        while self._results.num_left:
            self._clock.advance()
            yield self._clock.now

    # ---- requests ----

    def _expect(self, number: int) -> None:
        if number < len(self._trace.requests):
            arrival_s = self._trace.requests[number].arrival_s
            self._clock.at(arrival_s, Rank.ARRIVAL, functools.partial(self._arrive, number))

    def _arrive(self, number: int) -> None:
        now = self._clock.now
        request = self._prompts.request(number, self._trace.requests[number])
        query = RouteQuery(
            request.request_id,
            request.model,
            request.routing_hashes,
            len(request.prompt_token_ids),
            max_tokens=self._config.group.num_blocks * self._config.group.block_size,  # how many come is not known
        )
        choice = self.policy.route(query, now)
        if choice is None:
            self._results.note_refused(number)
        else:
            self._results.note_routed(number, choice.group)
            request = replace(request, expected_cached_tokens=choice.expected_cached_tokens)
            submission = functools.partial(self._submit, self.lines[choice.group], request)
            self._clock.at(now + self._config.submit_delay_s, Rank.SUBMISSION, submission)
        self._expect(number + 1)

    def _submit(self, line: _Line, request: Request) -> None:
        line.group.submit(request, self._clock.now)
        self._follow(line)

    # ---- groups ----

    def _wake(self, line: _Line) -> None:
        if line.wakes_at_s == line.group.wakes_at_s == self._clock.now:
            line.wakes_at_s = None
            line.group.wake()
            self._follow(line)

    def _follow(self, line: _Line) -> None:
        """Something has happened to the group: see to it that it is woken, and heard, in time."""
        time_s = line.group.wakes_at_s
        if time_s is not None and time_s != line.wakes_at_s:
            line.wakes_at_s = time_s
            self._clock.at(time_s, Rank.STEP, functools.partial(self._wake, line))
        self._plan_report(line)

    def _plan_report(self, line: _Line) -> None:
        if line.is_reporting:
            return
        due_s = self._report_due_s(line)
        if line.reports_at_s is None or due_s < line.reports_at_s:
            line.reports_at_s = due_s
            self._clock.at(due_s, Rank.REPORT, functools.partial(self._report, line))

    def _report_due_s(self, line: _Line) -> float:
        news_s = line.group.has_news_at_s(self._clock.now)
        return max(line.due_s if news_s is None else min(news_s, line.due_s), line.earliest_report_s)

    def _report(self, line: _Line) -> None:
        now = self._clock.now
        if line.reports_at_s != now or line.is_reporting:
            return
        line.reports_at_s = None
        report = line.group.take_report(now)
        if self._report_due_s(line) > now:  # the news that was expected did not come, since a request did
            self._plan_report(line)
            return
        line.is_reporting = True
        if now >= line.due_s:
            line.due_s = now + self._config.report_period_s
        delivery = functools.partial(self._deliver, line, report)
        self._clock.at(now + self._config.report_delay_s, Rank.DELIVERY, delivery)

    def _deliver(self, line: _Line, report: GroupReport) -> None:
        now = self._clock.now
        wants_snapshot = self.policy.report(report, now)
        line.group.report_arrived(report, wants_snapshot=wants_snapshot, now=now)
        line.is_reporting = False
        line.earliest_report_s = now + self._config.report_pause_s
        self._plan_report(line)
