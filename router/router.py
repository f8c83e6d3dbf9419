"""The router: takes the groups' reports in, gives the gateways' queries a group each.

Plain Python without a clock: ``now`` is in seconds of any steady clock, and the caller's. Not for several threads.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..worker.messages import (
    GroupEntry,
    GroupReport,
    Registry,
    RequestProgress,
    RouteDecision,
    RouteDecisions,
    RouteQueries,
    RouteQuery,
    SharedReservation,
    SharedReservations,
)
from .admission import Admission, AdmissionConfig, Refusal, Wait
from .chooser import Chooser
from .config import RouterConfig
from .counters import Counters
from .decision import Decision, Reason
from .group import Group
from .index import PrefixIndex
from .knowledge import GroupKnowledge
from .metrics import render_metrics
from .pool import Pool
from .predictions import Predictions
from .reservations import Reservations
from .sessions import Sessions
from .waiting import CanPlace

_NOWHERE = {
    Reason.UNKNOWN_MODEL: "no worker group serves the model {model}",
    Reason.NO_GROUP: "every worker group of the model is draining, has failed on the request, or is left out by it",
    Reason.NOT_ALLOWED: "none of the worker groups that the request allows is there: {groups}",
}


@dataclass(frozen=True, slots=True)
class _Queued:
    """Who is told when a waiting query's turn has come."""

    gateway_id: str
    query: RouteQuery
    arrived_s: float


class Router:
    """Selects and reserves in one step, by the lowest cost in seconds."""

    def __init__(self, config: RouterConfig, rng: random.Random) -> None:
        self.config = config
        self.counters = Counters()
        self.index = PrefixIndex(config.max_index_bytes)
        self.predictions = Predictions(config.prediction_timeout_s)
        self.pools: dict[str, Pool] = {}
        self.sessions = Sessions(config.max_sessions)
        self.reservations = Reservations(self.index, self.predictions, self.counters)
        self.admission = Admission(
            AdmissionConfig(config.max_queued_requests or 0, config.tenants, config.priority_aging_s)
        )
        self._chooser = Chooser(config.policy, rng, self.index, self.predictions, self.reservations, self.sessions)
        self._queued: dict[str, _Queued] = {}
        self._turns: dict[str, list[RouteDecision]] = {}
        """Gateway → decisions that ended waits and were not taken yet."""
        self._shared: list[SharedReservation] = []
        self._cancelled: list[str] = []
        self._decisions: deque[Decision] = deque(maxlen=config.num_explained)
        self._silence_possible_at_s = float("-inf")
        """No group can have been silent for too long before this time."""

    # Reports

    def report(self, report: GroupReport, now: float) -> bool:
        """Take in what a leader says; True asks it to send a snapshot of its cache with its next report.

        Harmless when repeated. A report of a generation that a later one has voided is ignored.
        """
        self._drop_silent(now)
        pool = self.pools.get(report.model)
        if pool is None:
            pool = self.pools[report.model] = Pool(report.model)
        if pool.is_void(report):
            self.counters.reports_fenced += 1
            return False
        earlier = pool.groups.get(report.group)
        if earlier is not None and earlier.generation != report.generation:
            self._drop(pool, earlier, now)
        group = pool.admit(report, lambda: self._new_group(report, now))
        group.update(report, now)
        for message in report.events:
            group.knowledge.apply(message)
        self.counters.event_lag.add(report.oldest_news_age_s)
        for progress in report.progress:
            self._note_progress(pool, group, progress, now)
        self._tidy(group, now)
        pool.note_load(group)
        return group.knowledge.wants_snapshot(now)

    # Queries

    def route(self, queries: RouteQueries, now: float) -> RouteDecisions:
        """A group for each query, reserved at once, so that the next query sees the load of this one."""
        self._drop_silent(now)
        self.cancel(queries.cancelled, now)
        return RouteDecisions(tuple([self._route(queries.gateway_id, query, now) for query in queries.queries]))

    def cancel(self, request_ids: Iterable[str], now: float) -> None:
        """Requests that will not reach their groups, or do not wait any more. Unknown ones are harmless."""
        for request_id in request_ids:
            self._queued.pop(request_id, None)
            is_known = self.admission.cancel(request_id, now)
            if (self.reservations.release(request_id) or is_known) and self.config.shares:
                self._cancelled.append(request_id)

    @property
    def num_queued(self) -> int:
        """Queries that wait for a group with room."""
        return self.admission.num_waiting

    def take_turns(self, now: float) -> dict[str, tuple[RouteDecision, ...]]:
        """Gateway → the decisions that ended waits since the last call. Ask after everything that may have made room,
        and once in a while as long as any query is queued."""
        if self.num_queued:
            self._drop_silent(now)
            for refusal in self.admission.expire(now):
                self._end_wait(_refused(self._queued[refusal.request_id].query, refusal, now))
            for pool in self.pools.values():
                self._end_hopeless(pool, now)
                self._place_waiting(pool, now)
        turns, self._turns = self._turns, {}
        return {gateway_id: tuple(decisions) for gateway_id, decisions in turns.items()}

    # Other routers

    def take_shared(self) -> SharedReservations | None:
        """What was decided and given up since the last call, for the other routers; None for nothing."""
        if not self._shared and not self._cancelled:
            return None
        shared = SharedReservations("", tuple(self._shared), tuple(self._cancelled))
        self._shared, self._cancelled = [], []
        return shared

    def adopt(self, shared: SharedReservations, now: float) -> None:
        """Count what another router has decided as load of the groups that are known here, and give up with it.

        What was asked here too is this router's own: its gateway has asked again, and waits for the answer from here.
        """
        for request_id in shared.cancelled:
            if self.reservations.is_adopted(request_id):
                self.reservations.release(request_id)
                self.admission.cancel(request_id, now)
        for reservation in shared.reservations:
            query = reservation.query
            if query.request_id in self._queued or self.reservations.is_own(query.request_id):
                continue
            pool = self.pools.get(query.model)
            group = pool.groups.get(reservation.group) if pool else None
            if pool is None or group is None or group.generation != reservation.generation:
                continue
            self.sessions.remember(query.model, query.session_id, group.name)
            self.reservations.reserve(pool, group, query, reservation.expected_cached_tokens, None, now)
            self.admission.adopt(query.request_id, query.model, query.tenant, group.generation, now)

    # Seen from outside

    def registry(self, now: float) -> Registry:
        """All live groups."""
        self._drop_silent(now)
        return Registry(
            tuple(
                GroupEntry(pool.model, group.name, group.generation, group.slot, group.report.draining)
                for pool in self.pools.values()
                for group in pool.groups.values()
            )
        )

    def explain(self, limit: int) -> list[dict[str, Any]]:
        """The last decisions, newest first, with all candidates and the parts of their costs."""
        newest = list(self._decisions)[::-1]
        return [decision.explain() for decision in newest[: max(0, limit)]]

    def metrics_text(self) -> str:
        """Prometheus text format."""
        return render_metrics(self.counters, self.index, self.predictions, self.pools.values())

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        self.index.check()
        self.predictions.check()
        self.admission.check()
        self.reservations.check(group for pool in self.pools.values() for group in pool.members)
        for pool in self.pools.values():
            pool.check()

    # Deciding

    def _route(self, gateway_id: str, query: RouteQuery, now: float) -> RouteDecision:
        self.reservations.release(query.request_id)  # What an earlier attempt reserved.
        self._queued.pop(query.request_id, None)
        decision = self._decide(query, now)
        if decision.reason is Reason.QUEUED:
            self._queued[query.request_id] = _Queued(gateway_id, query, now)
        return self._answer(decision)

    def _decide(self, query: RouteQuery, now: float) -> Decision:
        pool = self.pools.get(query.model)
        if pool is None:
            return _nowhere(query, None, now)
        able = pool.able(query)
        if not able.any():
            return _nowhere(query, pool, now)
        verdict = self.admission.arrive(self._as_tenant(query), now, self._can_place(pool))
        if isinstance(verdict, Refusal):
            return _refused(query, verdict, now)
        if isinstance(verdict, Wait):
            return _without_group(query, Reason.QUEUED, now, expected_wait_s=verdict.expected_s)
        return self._choose(pool, query, able, now)

    def _choose(self, pool: Pool, query: RouteQuery, among: npt.NDArray[np.bool_], now: float) -> Decision:
        """Of an admitted query."""
        decision = self._chooser.choose(pool, query, among, now)
        if decision.group is None:
            self.admission.cancel(query.request_id, now)
        else:
            self.admission.placed(query.request_id, decision.generation)
            if self.config.shares:
                self._shared.append(
                    SharedReservation(query, decision.group, decision.generation, decision.expected_cached_tokens)
                )
        return decision

    def _answer(self, decision: Decision) -> RouteDecision:
        self._decisions.append(decision)
        self.counters.decisions[decision.model, decision.reason.value] += 1
        return decision.answer()

    # The queue

    def _can_place(self, pool: Pool) -> CanPlace:
        """Whether a group with room is among those that a query may go to."""
        if self.config.max_queued_requests is None:
            return lambda query: True
        room = pool.has_room()
        if not room.any():
            self.admission.expect_drain(pool.model, pool.drain_per_s())
        return lambda query: bool((pool.able(query) & room).any())

    def _as_tenant(self, query: RouteQuery) -> RouteQuery:
        return query if self.config.knows_tenants or query.tenant is None else replace(query, tenant=None)

    def _place_waiting(self, pool: Pool, now: float) -> None:
        """Give places that are free to those whose turn it is."""
        while (query := self.admission.take_next(pool.model, self._can_place(pool), now)) is not None:
            among = pool.able(query) & pool.has_room()
            self._end_wait(self._choose(pool, query, among, now))

    def _end_hopeless(self, pool: Pool, now: float) -> None:
        """End the waits for groups that are gone or draining; looked for when groups have come, gone or drained."""
        if not pool.take_changes():
            return
        for request_id, queued in list(self._queued.items()):
            if queued.query.model == pool.model and not pool.able(queued.query).any():
                self.admission.cancel(request_id, now)
                self._end_wait(_nowhere(queued.query, pool, now))

    def _end_wait(self, decision: Decision) -> None:
        queued = self._queued.pop(decision.request_id)
        decision.queued_s = decision.made_at_s - queued.arrived_s
        if decision.group is not None:
            self.counters.queue_time.add(decision.queued_s)
        self._turns.setdefault(queued.gateway_id, []).append(self._answer(decision))

    # Books

    def _new_group(self, report: GroupReport, now: float) -> Group:
        knowledge = GroupKnowledge(
            report.generation, self.index, self.predictions, self.counters, self.config.snapshot_retry_s
        )
        return Group(report, knowledge, now)

    def _note_progress(self, pool: Pool, group: Group, progress: RequestProgress, now: float) -> None:
        self.reservations.note_progress(pool, group, progress)
        if progress.finished:
            self.admission.finish(progress.request_id, now, progress.num_output_tokens)
        else:
            tenant = progress.tenant if self.config.knows_tenants else None
            self.admission.adopt(progress.request_id, pool.model, tenant, group.generation, now)

    def _tidy(self, group: Group, now: float) -> None:
        config = self.config
        lost = self.reservations.expire(group, now, config.reservation_timeout_s, config.prediction_timeout_s)
        for request_id in lost:
            self.admission.cancel(request_id, now)
        self.predictions.expire(now)
        self.index.sweep(config.sweep_entries)

    def _drop_silent(self, now: float) -> None:
        if now < self._silence_possible_at_s:
            return
        for pool in self.pools.values():
            for group in list(pool.silent(now, self.config.group_timeout_s)):
                self._drop(pool, group, now)
        oldest = min(
            [group.reported_at_s for pool in self.pools.values() for group in pool.groups.values()], default=now
        )
        self._silence_possible_at_s = oldest + self.config.group_timeout_s

    def _drop(self, pool: Pool, group: Group, now: float) -> None:
        self.counters.groups_lost += 1
        self.reservations.drop(group)
        self.admission.lose(group.generation, now)
        group.knowledge.dispose()
        pool.remove(group)


def _nowhere(query: RouteQuery, pool: Pool | None, now: float) -> Decision:
    """Nothing is there to choose from."""
    reason = Reason.NO_GROUP
    if pool is None:
        reason = Reason.UNKNOWN_MODEL
    elif query.allowed_groups and not pool.rows_of(query.allowed_groups).any():
        reason = Reason.NOT_ALLOWED
    retry_after_s = None if reason is Reason.UNKNOWN_MODEL else 1.0
    detail = _NOWHERE[reason].format(model=query.model, groups=", ".join(query.allowed_groups))
    return _without_group(query, reason, now, detail=detail, retry_after_s=retry_after_s)


def _refused(query: RouteQuery, refusal: Refusal, now: float) -> Decision:
    reason = Reason(refusal.reason.value)
    return _without_group(query, reason, now, detail=refusal.detail, retry_after_s=refusal.retry_after_s)


def _without_group(query: RouteQuery, reason: Reason, now: float, **more: Any) -> Decision:
    return Decision(query.request_id, query.model, reason, now, query.num_prompt_tokens, **more)
