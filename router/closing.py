"""Closing: what a router refuses while the application that it is part of stops."""

from __future__ import annotations

import enum

from ..worker.messages import RouteDecision, RouteQuery
from .decision import Reason
from .router import Router

_RETRY_AFTER_S = 5.0
"""Who asks again then finds what has taken our place, or nobody."""


class _Door(enum.Enum):
    OPEN = enum.auto()
    FOR_KNOWN = enum.auto()
    CLOSED = enum.auto()


class Closing:
    """One per router, beside it: nothing else of what the router knows or decides changes by it."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._door = _Door.OPEN

    @property
    def has_begun(self) -> bool:
        return self._door is not _Door.OPEN

    @property
    def num_under_way(self) -> int:
        """Requests that run or wait."""
        return self._router.admission.num_running + self._router.admission.num_waiting

    def begin(self) -> None:
        """Refuse what is new; what was under way goes on, at another group where it must."""
        if self._door is _Door.OPEN:
            self._door = _Door.FOR_KNOWN

    def end(self) -> None:
        """Refuse everything: what loses its group now finds no other."""
        self._door = _Door.CLOSED

    def refusal(self, query: RouteQuery) -> RouteDecision | None:
        """None: let it in."""
        if self._door is _Door.OPEN or (self._door is _Door.FOR_KNOWN and self._is_under_way(query)):
            return None
        reason = Reason.STOPPING.value
        self._router.counters.decisions[query.model, reason] += 1
        detail = "the server is about to stop and takes nothing new"
        return RouteDecision(query.request_id, None, 0, 0, reason, retry_after_s=_RETRY_AFTER_S, detail=detail)

    def _is_under_way(self, query: RouteQuery) -> bool:
        return query.attempt > 1 or self._router.admission.knows(query.request_id)
