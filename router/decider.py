"""Decider: whether a query goes to a group now, and to which one; or waits, or goes nowhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..worker.messages import RouteQuery
from .admission import Admission
from .chooser import Chooser
from .config import RouterConfig
from .decision import Decision
from .pool import Pool
from .sharing import Sharing
from .verdicts import Refusal, Wait
from .waiting import CanPlace


class Decider:
    """Admission and choice in one step, so that the next query sees what this one was given."""

    def __init__(self, config: RouterConfig, admission: Admission, chooser: Chooser, sharing: Sharing) -> None:
        self._config = config
        self._admission = admission
        self._chooser = chooser
        self._sharing = sharing

    def decide(self, pool: Pool | None, query: RouteQuery, now: float) -> Decision:
        """Of a query that has come; ``pool`` is None for a model that nobody serves."""
        if pool is None:
            return Decision.nowhere(query, None, now)
        able = pool.able(query)
        if not able.any():
            return Decision.nowhere(query, pool, now)
        verdict = self._admission.arrive(self._as_tenant(query), now, self._can_place(pool))
        if isinstance(verdict, Refusal):
            return Decision.refused(query, verdict, now)
        if isinstance(verdict, Wait):
            return Decision.queued(query, verdict, now)
        return self._choose(pool, query, able, now, queued_s=0.0)

    def take_next(self, pool: Pool, now: float) -> RouteQuery | None:
        """Who of those that wait can go now; ``place`` it."""
        return self._admission.take_next(pool.model, self._can_place(pool), now)

    def place(self, pool: Pool, query: RouteQuery, now: float, queued_s: float) -> Decision:
        """Of a query that has waited for ``queued_s``."""
        return self._choose(pool, query, pool.able(query), now, queued_s)

    def _choose(
        self, pool: Pool, query: RouteQuery, able: npt.NDArray[np.bool_], now: float, queued_s: float
    ) -> Decision:
        """Of an admitted query."""
        decision = self._chooser.choose(pool, query, able, now, queued_s)
        if decision.group is None:
            self._admission.cancel(query.request_id, now)
        else:
            self._admission.placed(query.request_id, decision.generation)
            self._sharing.note_decided(query, decision)
        return decision

    def _can_place(self, pool: Pool) -> CanPlace:
        """Whether a group with room is among those that a query may go to."""
        if self._config.max_queued_requests is None:
            return lambda query: True
        room = pool.has_room()
        if not room.any():
            self._admission.expect_drain(pool.model, pool.drain_per_s())
        return lambda query: bool((pool.able(query) & room).any())

    def _as_tenant(self, query: RouteQuery) -> RouteQuery:
        return query if self._config.knows_tenants or query.tenant is None else replace(query, tenant=None)
