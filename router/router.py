"""The router: takes the groups' reports in, gives the gateways' queries a group each.

Plain Python without a clock: ``now`` is in seconds of any steady clock, and the caller's. Not for several threads.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
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
)
from .cost import Demand, choose_cheapest, estimate_cost
from .counters import Counters
from .decision import Candidate, Decision, Reason, reason_for
from .group import Group, Reservation
from .index import PrefixIndex, find_staircase, slots_in
from .knowledge import GroupKnowledge
from .metrics import render_metrics
from .pool import Pool
from .predictions import Predictions
from .sessions import Sessions


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Limits and time-outs. None of them steers where requests go."""

    max_index_bytes: int = 1 << 30
    group_timeout_s: float = 5.0
    """A group that has not reported for so long is dropped."""
    reservation_timeout_s: float = 10.0
    """A request that its group has not received by then is taken to be lost on the way."""
    prediction_timeout_s: float = 120.0
    """A request that is not computed by then stands for no blocks any more."""
    snapshot_retry_s: float = 1.0
    max_sessions: int = 100_000
    """Sessions whose last group is remembered."""
    num_explained: int = 256
    """Decisions kept for ``explain``."""
    sweep_entries: int = 4096
    """Index entries cleaned with each report while there is something to clean."""


class Router:
    """Selects and reserves in one step, by the lowest cost in seconds."""

    def __init__(self, config: RouterConfig, rng: random.Random) -> None:
        self.config = config
        self.counters = Counters()
        self.index = PrefixIndex(config.max_index_bytes)
        self.predictions = Predictions(config.prediction_timeout_s)
        self.pools: dict[str, Pool] = {}
        self.sessions = Sessions(config.max_sessions)
        self._owners: dict[str, Group] = {}
        """Request → the group that holds its reservation."""
        self._rng = rng
        self._decisions: deque[Decision] = deque(maxlen=config.num_explained)
        self._silence_possible_at_s = float("-inf")
        """No group can have been silent for too long before this time."""

    # Reports

    def report(self, report: GroupReport, now: float) -> bool:
        """Take in what a leader says; True asks it to send a snapshot of its cache with its next report.

        Harmless when repeated. A report of a generation that a later one has voided is ignored.
        """
        self._drop_silent(now)
        pool = self.pools.setdefault(report.model, Pool(report.model))
        if pool.is_void(report):
            self.counters.reports_fenced += 1
            return False
        earlier = pool.groups.get(report.group)
        if earlier is not None and earlier.generation != report.generation:
            self._drop(pool, earlier)
        group = pool.admit(report, lambda: self._new_group(report, now))
        group.update(report, now)
        for message in report.events:
            group.knowledge.apply(message)
        for progress in report.progress:
            self._note_progress(pool, group, progress)
        self._tidy(group, now)
        return group.knowledge.wants_snapshot(now)

    # Queries

    def route(self, queries: RouteQueries, now: float) -> RouteDecisions:
        """A group for each query, reserved at once, so that the next query sees the load of this one."""
        self._drop_silent(now)
        for request_id in queries.cancelled:
            self._release(request_id)
        return RouteDecisions(tuple([self._answer(query, now) for query in queries.queries]))

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
        groups = [group for pool in self.pools.values() for group in pool.groups.values()]
        for group in groups:
            group.check()
        reserved = {request_id: group for group in groups for request_id in group.reservations}
        if reserved != self._owners:
            raise AssertionError("reservations and their owners differ")

    # Deciding

    def _answer(self, query: RouteQuery, now: float) -> RouteDecision:
        self._release(query.request_id)  # What an earlier attempt reserved.
        decision = self._decide(query, now)
        self._decisions.append(decision)
        self.counters.decisions[query.model, decision.reason.value] += 1
        chosen = decision.chosen
        if chosen is None:
            retry_after_s = None if decision.reason is Reason.UNKNOWN_MODEL else 1.0
            return RouteDecision(query.request_id, None, 0, 0, decision.reason.value, retry_after_s)
        return RouteDecision(
            query.request_id, chosen.group, chosen.generation, chosen.cached_tokens, decision.reason.value
        )

    def _decide(self, query: RouteQuery, now: float) -> Decision:
        pool = self.pools.get(query.model)
        groups = pool.candidates(query.excluded_generations) if pool else []
        if pool is None or not groups:
            reason = Reason.UNKNOWN_MODEL if pool is None else Reason.NO_GROUP
            return Decision(query.request_id, query.model, reason, now, query.num_prompt_tokens, None, ())
        depths = self._match(query.routing_hashes, groups)
        candidates = _assess(pool, groups, depths, query, now)
        last = self.sessions.group_of(query.model, query.session_id)
        position = choose_cheapest(
            [candidate.cost for candidate in candidates],
            [candidate.cached_tokens for candidate in candidates],
            self._rng,
            preferred=next((place for place, group in enumerate(groups) if group.name == last), None),
        )
        chosen = candidates[position]
        decision = Decision(
            query.request_id,
            query.model,
            reason_for(chosen, candidates),
            now,
            query.num_prompt_tokens,
            chosen,
            candidates,
        )
        pool.add_work(chosen.cost.prefill_s, now)
        self.sessions.remember(query.model, query.session_id, chosen.group)
        self._reserve(groups[position], decision, query)
        return decision

    def _match(self, hashes: Sequence[int], groups: list[Group]) -> dict[int, int]:
        """Slot → depth in blocks, confirmed or assumed."""
        kept, depths = self.index.sample(hashes)
        among = sum([1 << group.knowledge.slot for group in groups])
        confirmed, assumed = self.index.mask_of, self.predictions.mask_of
        mask_of = (lambda value: confirmed(value) | assumed(value)) if len(self.predictions) else confirmed
        steps = find_staircase(mask_of, kept, among)
        return {slot: depths[step - 1] for step, mask in steps for slot in slots_in(mask)}

    def _reserve(self, group: Group, decision: Decision, query: RouteQuery) -> None:
        request_id, knowledge, block_size = query.request_id, group.knowledge, group.report.block_size
        expected = decision.chosen.cached_tokens if decision.chosen else 0
        steps = self.index.match(query.routing_hashes, 1 << group.slot)
        confirmed_blocks = steps[0][0] if steps else 0
        uncached = max(0, query.num_prompt_tokens - expected)
        group.reserve(
            request_id,
            Reservation(
                decision,
                confirmed_cached_tokens=min(expected, confirmed_blocks * block_size),
                num_uncached_tokens=uncached,
                num_new_blocks=-(-uncached // block_size),
                num_stored_before=knowledge.num_stored,
                num_removed_before=knowledge.num_removed,
                num_sequences=query.num_branches,
            ),
        )
        self._owners[request_id] = group
        # Blocks that the confirmed index holds anyway need no prediction.
        self.predictions.assume(request_id, group.slot, query.routing_hashes[confirmed_blocks:], decision.made_at_s)

    # Books

    def _new_group(self, report: GroupReport, now: float) -> Group:
        knowledge = GroupKnowledge(
            report.generation, self.index, self.predictions, self.counters, self.config.snapshot_retry_s
        )
        return Group(report, knowledge, now)

    def _note_progress(self, pool: Pool, group: Group, progress: RequestProgress) -> None:
        group.received(progress.request_id)
        if progress.finished:
            num_sequences = group.forget_sequences(progress.request_id)
            if progress.num_output_tokens > 0:
                pool.output_tokens.add(progress.num_output_tokens / num_sequences)
        if (progress.prefilled or progress.finished) and progress.request_id in group.reservations:
            reservation = group.reservations[progress.request_id]
            self._release(progress.request_id)
            if not progress.finished:
                group.note_prefilled(progress.request_id, reservation)
            if progress.prefilled:
                self._compare(group, reservation, progress.num_cached_tokens)

    def _compare(self, group: Group, reservation: Reservation, actual: int) -> None:
        """What the prefill found, against what was expected: confirms what is known of the group, or casts doubt."""
        decision, knowledge, counters = reservation.decision, group.knowledge, self.counters
        expected = decision.chosen.cached_tokens if decision.chosen else 0
        decision.actual_cached_tokens = actual
        counters.prompt_tokens[decision.model] += decision.num_prompt_tokens
        counters.expected_cached_tokens[decision.model] += expected
        counters.actual_cached_tokens[decision.model] += actual
        knowledge.observe(reservation.confirmed_cached_tokens, actual)
        # Less than confirmed is explained by blocks removed meanwhile, more than expected by blocks stored meanwhile.
        unexplained = (
            actual < reservation.confirmed_cached_tokens and knowledge.num_removed == reservation.num_removed_before
        ) or (actual > expected and self.index.stride == 1 and knowledge.num_stored == reservation.num_stored_before)
        if unexplained:
            knowledge.doubt()
        counters.outcomes[_outcome(expected, actual, unexplained)] += 1

    def _release(self, request_id: str) -> None:
        group = self._owners.pop(request_id, None)
        if group is not None:
            group.release(request_id)
            self.predictions.drop(request_id)

    def _tidy(self, group: Group, now: float) -> None:
        config = self.config
        for request_id in group.overdue(now, config.reservation_timeout_s, config.prediction_timeout_s):
            self.counters.reservations_expired += 1
            self._release(request_id)
        self.predictions.expire(now)
        self.index.sweep(config.sweep_entries)

    def _drop_silent(self, now: float) -> None:
        if now < self._silence_possible_at_s:
            return
        for pool in self.pools.values():
            for group in list(pool.silent(now, self.config.group_timeout_s)):
                self._drop(pool, group)
        oldest = min(
            [group.reported_at_s for pool in self.pools.values() for group in pool.groups.values()], default=now
        )
        self._silence_possible_at_s = oldest + self.config.group_timeout_s

    def _drop(self, pool: Pool, group: Group) -> None:
        self.counters.groups_lost += 1
        for request_id in list(group.reservations):
            self._release(request_id)
        group.knowledge.dispose()
        pool.remove(group)


def _assess(
    pool: Pool, groups: list[Group], depths: dict[int, int], query: RouteQuery, now: float
) -> tuple[Candidate, ...]:
    """Every group with what it holds of the prompt and what it would cost."""
    utilisation, priors = pool.utilisation(now), pool.priors
    num_tokens, num_output_tokens = query.num_prompt_tokens, min(float(query.max_tokens), pool.output_tokens.value)
    candidates = []
    for group in groups:
        report, knowledge = group.report, group.knowledge
        # At least the last prompt token is always computed, so the block that it ends cannot be used.
        usable_blocks = min(depths.get(knowledge.slot, 0), max(0, num_tokens - 1) // report.block_size)
        cached = usable_blocks * report.block_size
        demand = Demand(num_tokens - cached * knowledge.confidence, num_output_tokens, query.num_branches)
        cost = estimate_cost(group.load(priors), demand, utilisation, now)
        candidates.append(Candidate(report.group, report.generation, knowledge.state, cached, cost))
    return tuple(candidates)


def _outcome(expected: int, actual: int, unexplained: bool) -> str:
    if unexplained:
        return "contradiction"
    if actual == expected:
        return "as_expected"
    return "less" if actual < expected else "more"
