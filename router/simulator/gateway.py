"""A simulated gateway: takes the requests of a trace to the groups that the policy chooses, as the production one does.

A request whose group has died is sent on with its prompt and its output so far, not to that generation again. While no
group can take it, it is asked for again a moment later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace

from ...worker.messages import Branch, GroupReport, Request, RouteDecision, RouteQuery
from .clock import Clock, Rank
from .line import Line
from .metrics import Results
from .policies import Policy
from .prompts import Prompts, own_token
from .traces import Trace

_RETRY_PAUSE_S = 0.25
_PATIENCE_S = 30.0
"""How long a request waits for a group that can take it at all."""

_NOT_NOW = ("unknown_model", "no_group")
"""Reasons why no group was chosen that may pass."""


class Gateway:
    """``line_of(group)`` is the present generation's. ``most_tokens``: of a sequence; how many come is not known."""

    def __init__(
        self,
        trace: Trace,
        prompts: Prompts,
        clock: Clock,
        results: Results,
        policy: Policy,
        line_of: Callable[[str], Line],
        *,
        submit_delay_s: float,
        most_tokens: int,
    ) -> None:
        self.policy = policy
        self._trace = trace
        self._prompts = prompts
        self._clock = clock
        self._results = results
        self._line_of = line_of
        self._submit_delay_s = submit_delay_s
        self._most_tokens = most_tokens
        self._dead: tuple[int, ...] = ()
        """Generations that requests were lost with."""
        self._queued: dict[str, Request] = {}
        """What waits in the router for its turn."""

    def expect(self, number: int = 0) -> None:
        """The trace's requests from ``number`` on."""
        if number < len(self._trace.requests):
            arrival_s = self._trace.requests[number].arrival_s
            self._clock.at(arrival_s, Rank.ARRIVAL, functools.partial(self._arrive, number))

    def report(self, report: GroupReport) -> bool:
        """Pass a report on to the policy; its answer."""
        wants_snapshot = self.policy.report(report, self._clock.now)
        self._take_turns()
        return wants_snapshot

    def change_policy(self, policy: Policy) -> None:
        """The router has died; what waited there is asked for again."""
        self.policy = policy
        waiting, self._queued = self._queued, {}
        for request in waiting.values():
            self._place(request)

    def move(self, request_ids: Iterable[str], dead: int) -> None:
        """Requests were lost with a generation of a group: they go on elsewhere."""
        self._dead = (*self._dead, dead)
        for request_id in request_ids:
            self._results.note_moved(int(request_id))
            self._place(self._continuation(int(request_id)))

    # ---- placing ----

    def _arrive(self, number: int) -> None:
        self._place(self._prompts.request(number, self._trace.requests[number]))
        self.expect(number + 1)

    def _continuation(self, number: int) -> Request:
        request = self._prompts.request(number, self._trace.requests[number])
        output = (own_token(number),) * self._results.num_output_tokens(number)
        return replace(request, branches=(Branch(0, output),), attempt=2)

    def _place(self, request: Request, asked_first_s: float | None = None) -> None:
        now = self._clock.now
        decision = self.policy.route(self._query(request), now)
        if decision.queued:
            self._queued[request.request_id] = request
        elif decision.group is None and decision.reason in _NOT_NOW:
            self._retry(request, now if asked_first_s is None else asked_first_s)
        else:
            self._take(request, decision)
        self._take_turns()

    def _retry(self, request: Request, asked_first_s: float) -> None:
        time_s = self._clock.now + _RETRY_PAUSE_S
        if time_s > asked_first_s + _PATIENCE_S:
            self._results.note_refused(int(request.request_id))
        else:
            self._clock.at(time_s, Rank.ARRIVAL, functools.partial(self._place, request, asked_first_s))

    def _query(self, request: Request) -> RouteQuery:
        return RouteQuery(
            request.request_id,
            request.model,
            request.routing_hashes,
            len(request.prompt_token_ids),
            max_tokens=self._most_tokens,
            excluded_generations=self._dead,
            attempt=request.attempt,
        )

    def _take_turns(self) -> None:
        for decision in self.policy.turns(self._clock.now):
            request = self._queued.pop(decision.request_id, None)
            if request is not None:
                self._take(request, decision)

    def _take(self, request: Request, decision: RouteDecision) -> None:
        number = int(request.request_id)
        if decision.group is None:
            self._results.note_refused(number)
            return
        self._results.note_routed(number, decision.group)
        request = replace(request, expected_cached_tokens=decision.expected_cached_tokens)
        submission = functools.partial(self._submit, self._line_of(decision.group), request)
        self._clock.at(self._clock.now + self._submit_delay_s, Rank.SUBMISSION, submission)

    def _submit(self, line: Line, request: Request) -> None:
        if line.is_dead:
            self.move([request.request_id], line.group.generation)
        else:
            line.submit(request)
