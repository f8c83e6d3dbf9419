"""Sharing: what a router has to tell the other routers that serve the same groups."""

from __future__ import annotations

from ..worker.messages import RouteQuery, SharedReservation, SharedReservations
from .decision import Decision


class Sharing:
    """``has_others``: there is somebody to tell; else nothing is kept."""

    def __init__(self, has_others: bool) -> None:
        self._has_others = has_others
        self._decided: list[SharedReservation] = []
        self._given_up: list[str] = []

    def note_decided(self, query: RouteQuery, decision: Decision) -> None:
        """The request goes to a group."""
        if self._has_others and decision.group is not None:
            self._decided.append(
                SharedReservation(query, decision.group, decision.generation, decision.expected_cached_tokens)
            )

    def note_given_up(self, request_id: str) -> None:
        if self._has_others:
            self._given_up.append(request_id)

    def take(self) -> SharedReservations | None:
        """What has come since the last call; None for nothing."""
        if not self._decided and not self._given_up:
            return None
        shared = SharedReservations(tuple(self._decided), tuple(self._given_up))
        self._decided, self._given_up = [], []
        return shared
