"""Chooser: which group gets a request that may go now, and the books of that choice."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from ..worker.messages import RouteQuery
from ..worker.routing_hash import unpack_hashes
from .assessment import Assessment, assess
from .decision import Decision, Reason, reason_for
from .index import PrefixIndex
from .policies import PolicyName, make_policy
from .pool import Pool
from .predictions import Predictions
from .reservations import Reservations
from .sessions import Sessions
from .verdicts import describe_wait


class Chooser:
    """Selects and reserves in one step."""

    def __init__(
        self,
        policy: PolicyName,
        rng: random.Random,
        index: PrefixIndex,
        predictions: Predictions,
        reservations: Reservations,
        sessions: Sessions,
    ) -> None:
        self._is_by_cost = policy == "cost"
        self._policy = make_policy(policy, rng)
        self._index = index
        self._predictions = predictions
        self._reservations = reservations
        self._sessions = sessions

    def choose(
        self, pool: Pool, query: RouteQuery, able: npt.NDArray[np.bool_], now: float, queued_s: float
    ) -> Decision:
        """Reserve one of the groups that are ``able``, bool [num_groups], one at least; or refuse a new request that
        none of them can begin within what the wait here, ``queued_s``, has left of its time."""
        depths = self._index.depths(unpack_hashes(query.routing_hashes), pool.slots, self._predictions)
        seen = assess(pool, depths, query, self._preferred(pool, query), now)
        if (missed := _missed_deadline(query, seen, able, now, queued_s)) is not None:
            return missed
        row = self._policy.choose(query, seen, np.flatnonzero(able))
        reason = reason_for(seen, row) if self._is_by_cost else Reason.POLICY
        decision = Decision.of(query, seen, row, reason, now)
        group = seen.members[row]
        self._sessions.remember(query, group.name)
        self._reservations.reserve(pool, group, query, decision.expected_cached_tokens, decision, now)
        return decision

    def _preferred(self, pool: Pool, query: RouteQuery) -> npt.NDArray[np.bool_] | None:
        """bool [num_groups]: groups that the request prefers, or else the one that served its session; None: none."""
        names = query.preferred_groups or self._sessions.groups_of(query)
        rows = pool.rows_of(names) if names else None
        return rows if rows is not None and rows.any() else None


def _missed_deadline(
    query: RouteQuery, seen: Assessment, able: npt.NDArray[np.bool_], now: float, queued_s: float
) -> Decision | None:
    """The refusal of a request that would still wait when its time is over, whichever group it went to."""
    limits = {"timeout": query.timeout_s, "queue_timeout": query.queue_timeout_s}
    given = {name: limit_s for name, limit_s in limits.items() if limit_s is not None}
    if not given or query.attempt > 1 or not seen.is_measured:
        return None
    name, limit_s = min(given.items(), key=lambda item: item[1])
    wait_s = queued_s + float(seen.cost.wait_s[able].min())
    if wait_s <= limit_s:
        return None
    return Decision(
        query.request_id,
        query.model,
        Reason.DEADLINE,
        now,
        query.num_prompt_tokens,
        seen,
        detail=describe_wait(name, limit_s, wait_s),
        retry_after_s=max(1.0, wait_s - limit_s),
    )
