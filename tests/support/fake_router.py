"""A Router that queues what it is told to queue, for tests of what carries its decisions."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from octavo.router.counters import Counters
from octavo.worker.messages import (
    GroupEntry,
    GroupReport,
    Registry,
    RouteDecision,
    RouteDecisions,
    RouteQueries,
    RouteQuery,
    SharedReservation,
    SharedReservations,
)


class FakeRouter:
    """Everything goes to the group ``group``; while ``is_full``, it waits for ``let_go``."""

    def __init__(self, group: str = "a") -> None:
        self.group = group
        self.is_full = False
        self.counters = Counters()
        self.fails_on = ""
        """A request's id, or a group's."""
        self.asked: list[RouteQuery] = []
        self.cancelled: list[str] = []
        self.adopted: list[SharedReservations] = []
        self.num_groups = 1
        self.num_reports = 0
        self._queue: dict[str, tuple[str, RouteQuery]] = {}
        self._turns: dict[str, list[RouteDecision]] = {}
        self._decided: list[SharedReservation] = []

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def route(self, queries: RouteQueries, now: float) -> RouteDecisions:
        self.cancel(queries.cancelled, now)
        self.asked += queries.queries
        return RouteDecisions(tuple(self._answer(queries.gateway_id, query) for query in queries.queries))

    def _answer(self, gateway_id: str, query: RouteQuery) -> RouteDecision:
        self._fail_on(query.request_id)
        if self.is_full:
            self._queue[query.request_id] = (gateway_id, query)
            return RouteDecision(query.request_id, None, 0, 0, "queued", queued=True)
        return self._decide(query)

    def _fail_on(self, name: str) -> None:
        if name == self.fails_on:
            raise ZeroDivisionError

    def _decide(self, query: RouteQuery) -> RouteDecision:
        self._decided.append(SharedReservation(query, self.group, 1, 0))
        return RouteDecision(query.request_id, self.group, 1, 0, "only")

    def let_go(self, request_id: str) -> None:
        """It is the request's turn."""
        gateway_id, query = self._queue.pop(request_id)
        self._turns.setdefault(gateway_id, []).append(self._decide(query))

    def queued_of(self, gateway_ids: Container[str]) -> tuple[str, ...]:
        return tuple([name for name, (gateway_id, _) in self._queue.items() if gateway_id in gateway_ids])

    def take_turns(self, now: float) -> dict[str, tuple[RouteDecision, ...]]:
        turns, self._turns = self._turns, {}
        return {gateway_id: tuple(decisions) for gateway_id, decisions in turns.items()}

    def cancel(self, request_ids: tuple[str, ...], now: float) -> None:
        self.cancelled += request_ids
        for request_id in request_ids:
            self._queue.pop(request_id, None)

    def take_shared(self) -> SharedReservations | None:
        decided, self._decided = self._decided, []
        return SharedReservations(tuple(decided)) if decided else None

    def adopt(self, shared: SharedReservations, now: float) -> None:
        self.adopted.append(shared)

    def report(self, report: GroupReport, now: float) -> bool:
        self.num_reports += 1
        self._fail_on(report.group)
        return True

    def registry(self, now: float) -> Registry:
        return Registry(tuple(GroupEntry("m", f"g{n}", n, n, False) for n in range(self.num_groups)))

    def metrics_text(self) -> str:
        return f'octavo_router_groups{{model="m"}} {self.num_groups}\noctavo_router_queued {self.num_queued}\n'

    def explain(self, limit: int) -> list[dict[str, Any]]:
        return [{"request_id": query.request_id, "made_at_s": 0.0} for query in self.asked[::-1][:limit]]
