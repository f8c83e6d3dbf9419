"""The router: takes the groups' reports in, gives the gateways' queries a group each.

Plain Python without a clock: ``now`` is in seconds of any steady clock, and the caller's. Not for several threads.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Container, Iterable
from typing import Any

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
from .admission import Admission, AdmissionConfig
from .chooser import Chooser
from .config import RouterConfig
from .counters import Counters
from .decider import Decider
from .decision import Decision, DecisionLog, Reason
from .group import Group
from .index import PrefixIndex
from .judge import impossible
from .knowledge import GroupKnowledge
from .metrics import render_metrics
from .outlook import Outlook, outlook
from .pool import Pool
from .predictions import Predictions
from .queued import Queued, QueuedQueries
from .reservations import Reservations
from .sessions import Sessions
from .sharing import Sharing

logger = logging.getLogger(__name__)


class Router:
    """What leaders report and gateways ask, each passed through the parts in order."""

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
        chooser = Chooser(config.policy, rng, self.index, self.predictions, self.reservations, self.sessions)
        self._sharing = Sharing(config.shares)
        self._decider = Decider(config, self.admission, chooser, self._sharing)
        self._queued = QueuedQueries()
        self._decisions = DecisionLog(config.num_explained)
        self._silence_possible_at_s = float("-inf")
        """No group can have been silent for too long before this time."""

    # Reports

    def report(self, report: GroupReport, now: float) -> bool:
        """Take in what a leader says; True asks it to send a snapshot of its cache with its next report.

        Harmless when repeated. A report of a generation that a later one has voided is ignored.
        """
        self._drop_silent(now)
        if (pool := self._pool_for(report)) is None:
            return False
        group = self._group_for(pool, report, now)
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
            self._queued.remove(request_id)
            is_known = self.admission.cancel(request_id, now)
            if self.reservations.release(request_id) or is_known:
                self._sharing.note_given_up(request_id)

    @property
    def num_queued(self) -> int:
        """Queries that wait for a group with room."""
        return self.admission.num_waiting

    def outlook(self, model: str) -> Outlook | None:
        """How a new request of the model would fare; None when no group takes any."""
        pool = self.pools.get(model)
        return None if pool is None else outlook(pool, self.admission.num_waiting_for(model))

    def queued_of(self, gateway_ids: Container[str]) -> tuple[str, ...]:
        """Requests of these gateways that wait."""
        return self._queued.of_gateways(gateway_ids)

    def take_turns(self, now: float) -> dict[str, tuple[RouteDecision, ...]]:
        """Gateway → the decisions that ended waits since the last call. Ask after everything that may have made room,
        and once in a while as long as any query is queued."""
        if self.num_queued:
            self._drop_silent(now)
            for refusal in self.admission.expire(now):
                self._end_wait(Decision.refused(self._queued[refusal.request_id].query, refusal, now))
            for pool in self.pools.values():
                self._end_hopeless(pool, now)
                self._place_waiting(pool, now)
        return self._queued.take_turns()

    # Other routers

    def take_shared(self) -> SharedReservations | None:
        """What was decided and given up since the last call, for the other routers; None for nothing."""
        return self._sharing.take()

    def adopt(self, shared: SharedReservations, now: float) -> None:
        """Count what another router has decided as load of the groups that are known here, and give up with it.

        What was asked here too is this router's own: its gateway has asked again, and waits for the answer from here.
        """
        for request_id in shared.cancelled:
            if self.reservations.is_adopted(request_id):
                self.reservations.release(request_id)
                self.admission.cancel(request_id, now)
        for reservation in shared.reservations:
            self._adopt(reservation, now)

    # Seen from outside

    def registry(self, now: float) -> Registry:
        """All live groups."""
        self._drop_silent(now)
        return Registry(
            tuple(
                GroupEntry(
                    pool.model, group.name, group.generation, group.slot, group.report.draining, group.report.weights
                )
                for pool in self.pools.values()
                for group in pool.groups.values()
            )
        )

    def explain(self, limit: int) -> list[dict[str, Any]]:
        """The last decisions, newest first, with all candidates and the parts of their costs."""
        return self._decisions.explain(limit)

    def metrics_text(self) -> str:
        """Prometheus text format."""
        return render_metrics(self.counters, self.index, self.predictions, self.pools.values(), self.admission)

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        self.index.check()
        self.predictions.check()
        self.admission.check()
        if self._queued.ids != self.admission.waiting_ids:
            raise AssertionError("what is queued here and what waits for admission differ")
        self.reservations.check(group for pool in self.pools.values() for group in pool.members)
        for pool in self.pools.values():
            pool.check()

    # Deciding

    def _route(self, gateway_id: str, query: RouteQuery, now: float) -> RouteDecision:
        self.reservations.release(query.request_id)  # What an earlier attempt reserved.
        queued = self._queued.remove(query.request_id)
        decision = self._decider.decide(self.pools.get(query.model), query, now)
        if decision.reason is Reason.QUEUED:  # asked again, it keeps its place
            self._queued.put(Queued(gateway_id, query, queued.arrived_s if queued else now))
        elif queued is not None and decision.group is None:
            self.admission.cancel(query.request_id, now)
        return self._answer(decision)

    def _answer(self, decision: Decision) -> RouteDecision:
        self._decisions.add(decision)
        self.counters.decisions[decision.model, decision.reason.value] += 1
        return decision.answer()

    # The queue

    def _place_waiting(self, pool: Pool, now: float) -> None:
        """Give places that are free to those whose turn it is."""
        while (query := self._decider.take_next(pool, now)) is not None:
            queued = self._queued[query.request_id]
            self._end_wait(self._decider.place(pool, queued.query, now, now - queued.arrived_s))

    def _end_hopeless(self, pool: Pool, now: float) -> None:
        """End the waits for groups that are gone or draining; looked for when groups have come, gone or drained."""
        if not pool.take_changes():
            return
        for queued in self._queued.of_model(pool.model):
            if not pool.able(queued.query).any():
                self.admission.cancel(queued.query.request_id, now)
                self._end_wait(Decision.nowhere(queued.query, pool, now))

    def _end_wait(self, decision: Decision) -> None:
        decision.queued_s = decision.made_at_s - self._queued[decision.request_id].arrived_s
        if decision.group is not None:
            self.counters.queue_time.add(decision.queued_s)
        self._queued.give_turn(decision.request_id, self._answer(decision))

    # Books

    def _adopt(self, reservation: SharedReservation, now: float) -> None:
        query = reservation.query
        request_id, pool = query.request_id, self.pools.get(query.model)
        if request_id in self._queued or self.reservations.is_own(request_id) or self.admission.has_ended(request_id):
            return
        group = pool.groups.get(reservation.group) if pool else None
        if pool is None or group is None or group.generation != reservation.generation:
            return
        self.sessions.remember(query, group.name)
        self.reservations.reserve(pool, group, query, reservation.expected_cached_tokens, None, now)
        self.admission.adopt(request_id, query.model, self._tenant(query.tenant), group.generation, now)

    def _pool_for(self, report: GroupReport) -> Pool | None:
        """None for a report that says what cannot be, or comes too late."""
        if (problem := impossible(report)) is not None:
            self.counters.reports_malformed += 1
            logger.error("report of %s, generation %s, ignored: %s", report.group, report.generation, problem)
            return None
        pool = self.pools.get(report.model)
        if pool is None:
            pool = self.pools[report.model] = Pool(report.model)
        if pool.is_void(report):
            self.counters.reports_fenced += 1
            return None
        return pool

    def _group_for(self, pool: Pool, report: GroupReport, now: float) -> Group:
        """In the generation that reports; an earlier one is gone."""
        earlier = pool.groups.get(report.group)
        if earlier is not None and earlier.generation != report.generation:
            self._drop(pool, earlier, now)
        return pool.admit(report, lambda: self._new_group(report, now))

    def _new_group(self, report: GroupReport, now: float) -> Group:
        retry_s = self.config.snapshot_retry_s
        knowledge = GroupKnowledge(report.generation, self.index, self.predictions, self.counters, retry_s)
        return Group(report, knowledge, now)

    def _note_progress(self, pool: Pool, group: Group, progress: RequestProgress, now: float) -> None:
        self.reservations.note_progress(pool, group, progress)
        if progress.finished:
            self.admission.finish(progress.request_id, now, progress.num_output_tokens)
        elif progress.request_id not in self._queued:  # else what its gateway has given up there
            tenant = self._tenant(progress.tenant)
            self.admission.adopt(progress.request_id, pool.model, tenant, group.generation, now)

    def _tenant(self, name: str | None) -> str | None:
        """As admission knows it."""
        return name if self.config.knows_tenants else None

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
