"""Reservations: requests that were given to a group and are not computed yet, and what became of them.

A reservation holds what the decision expected. When the group reports the prefill, what was found is compared with it:
that confirms what is known of the group's cache, or makes it STALE.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..worker.messages import RequestProgress, RouteQuery
from ..worker.routing_hash import unpack_hashes
from .counters import Counters
from .decision import Decision
from .group import Group, Reservation
from .index import PrefixIndex
from .pool import Pool
from .predictions import Predictions


class Reservations:
    """Of all groups of all models; the predictions that stand for them live and end with them."""

    def __init__(self, index: PrefixIndex, predictions: Predictions, counters: Counters) -> None:
        self._index = index
        self._predictions = predictions
        self._counters = counters
        self._owners: dict[str, tuple[Pool, Group]] = {}
        """Request → where its reservation is."""

    def reserve(
        self, pool: Pool, group: Group, query: RouteQuery, expected: int, decision: Decision | None, now: float
    ) -> None:
        """``query`` goes to ``group``, which is expected to hold ``expected`` tokens of its prompt. ``decision``: None
        for another router's. Takes the place of an earlier reservation of the request."""
        self.release(query.request_id)
        knowledge, block_size = group.knowledge, group.report.block_size
        hashes = unpack_hashes(query.routing_hashes)
        confirmed_blocks = int(self._index.depths(hashes, 1 << group.slot)[group.slot])
        uncached = max(0, query.num_prompt_tokens - expected)
        pool.give_work(group, uncached, expected, now)
        reservation = Reservation(
            query,
            now,
            decision,
            expected,
            confirmed_cached_tokens=min(expected, confirmed_blocks * block_size),
            num_uncached_tokens=uncached,
            num_new_blocks=-(-uncached // block_size),
            num_stored_before=knowledge.num_stored,
            num_removed_before=knowledge.num_removed,
        )
        group.reserve(query.request_id, reservation)
        pool.note_load(group)
        self._owners[query.request_id] = (pool, group)
        # Blocks that the confirmed index holds anyway need no prediction.
        self._predictions.assume(query.request_id, group.slot, hashes[confirmed_blocks:], now)

    def is_own(self, request_id: str) -> bool:
        """Reserved by a decision of this router."""
        owner = self._owners.get(request_id)
        return owner is not None and owner[1].reservations[request_id].decision is not None

    def is_adopted(self, request_id: str) -> bool:
        """Reserved by another router."""
        return request_id in self._owners and not self.is_own(request_id)

    def release(self, request_id: str) -> bool:
        """Nothing is reserved for the request any more; whether something was."""
        owner = self._owners.pop(request_id, None)
        if owner is None:
            return False
        pool, group = owner
        group.release(request_id)
        pool.note_load(group)
        self._predictions.drop(request_id)
        return True

    def note_progress(self, pool: Pool, group: Group, progress: RequestProgress) -> None:
        """What the group says of one request. The pool has to be told of the group's load afterwards."""
        group.received(progress.request_id)
        if progress.finished:
            num_sequences = group.forget_sequences(progress.request_id)
            if progress.num_output_tokens > 0:
                pool.output_tokens.add(progress.num_output_tokens / num_sequences)
        reservation = group.reservations.get(progress.request_id)
        if reservation is None or not (progress.prefilled or progress.finished):
            return
        self.release(progress.request_id)
        if not progress.finished:
            group.note_prefilled(progress.request_id, reservation)
        if progress.prefilled:
            self._compare(group, reservation, progress)

    def expire(self, group: Group, now: float, timeout_s: float, received_timeout_s: float) -> list[str]:
        """Give up what should have been received, or be computed, by now; those that the group has never received."""
        lost = []
        for request_id in group.overdue(now, timeout_s, received_timeout_s):
            if not group.reservations[request_id].received:
                lost.append(request_id)
            self._counters.reservations_expired += 1
            self.release(request_id)
        return lost

    def drop(self, group: Group) -> None:
        """The group is gone."""
        for request_id in list(group.reservations):
            self.release(request_id)

    def check(self, groups: Iterable[Group]) -> None:
        """Raise AssertionError if the books do not balance."""
        groups = list(groups)
        for group in groups:
            group.check()
        reserved = {request_id: group for group in groups for request_id in group.reservations}
        if reserved != {request_id: group for request_id, (_, group) in self._owners.items()}:
            raise AssertionError("reservations and their owners differ")

    def _compare(self, group: Group, reservation: Reservation, progress: RequestProgress) -> None:
        knowledge, actual, expected = group.knowledge, progress.num_cached_tokens, reservation.expected_cached_tokens
        knowledge.observe(reservation.confirmed_cached_tokens, actual)
        # Less than confirmed is explained by blocks removed meanwhile, more than expected by blocks stored meanwhile.
        unexplained = (
            actual < reservation.confirmed_cached_tokens and knowledge.num_removed == reservation.num_removed_before
        ) or (actual > expected and self._index.stride == 1 and knowledge.num_stored == reservation.num_stored_before)
        if unexplained:
            knowledge.doubt()
        if reservation.decision is not None:
            self._count(reservation.decision, progress, _outcome(expected, actual, unexplained))

    def _count(self, decision: Decision, progress: RequestProgress, outcome: str) -> None:
        counters, model = self._counters, decision.model
        decision.actual_cached_tokens = progress.num_cached_tokens
        counters.prompt_tokens[model] += decision.num_prompt_tokens
        counters.expected_cached_tokens[model] += decision.expected_cached_tokens
        counters.actual_cached_tokens[model] += progress.num_cached_tokens
        counters.outcomes[outcome] += 1
        if progress.ttft_s > 0:
            decision.actual_ttft_s = progress.ttft_s
            counters.expected_ttft_s[model] += decision.expected_ttft_s
            counters.actual_ttft_s[model] += progress.ttft_s
            counters.ttft_error.add(abs(progress.ttft_s - decision.expected_ttft_s))


def _outcome(expected: int, actual: int, unexplained: bool) -> str:
    if unexplained:
        return "contradiction"
    if actual == expected:
        return "as_expected"
    return "less" if actual < expected else "more"
