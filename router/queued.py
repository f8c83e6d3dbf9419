"""QueuedQueries: which gateway's queries wait here, and the decisions that ended waits until they are fetched."""

from __future__ import annotations

from collections.abc import Container, KeysView
from dataclasses import dataclass

from ..worker.messages import RouteDecision, RouteQuery


@dataclass(frozen=True, slots=True)
class Queued:
    """Who is told when a waiting query's turn has come."""

    gateway_id: str
    query: RouteQuery
    arrived_s: float


class QueuedQueries:
    """By request id."""

    def __init__(self) -> None:
        self._queued: dict[str, Queued] = {}
        self._turns: dict[str, list[RouteDecision]] = {}
        """By gateway."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queued

    def __getitem__(self, request_id: str) -> Queued:
        return self._queued[request_id]

    @property
    def ids(self) -> KeysView[str]:
        return self._queued.keys()

    def of_gateways(self, gateway_ids: Container[str]) -> tuple[str, ...]:
        """Their requests."""
        return tuple([request_id for request_id, each in self._queued.items() if each.gateway_id in gateway_ids])

    def of_model(self, model: str) -> list[Queued]:
        return [each for each in self._queued.values() if each.query.model == model]

    def put(self, queued: Queued) -> None:
        self._queued[queued.query.request_id] = queued

    def remove(self, request_id: str) -> Queued | None:
        """Without a turn; None if it does not wait."""
        return self._queued.pop(request_id, None)

    def give_turn(self, request_id: str, decision: RouteDecision) -> None:
        """The decision ends its wait."""
        self._turns.setdefault(self._queued.pop(request_id).gateway_id, []).append(decision)

    def take_turns(self) -> dict[str, tuple[RouteDecision, ...]]:
        """Gateway → the decisions that ended waits since the last call."""
        turns, self._turns = self._turns, {}
        return {gateway_id: tuple(decisions) for gateway_id, decisions in turns.items()}
