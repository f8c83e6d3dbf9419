"""Peer: a router's line to another one. What it is told is a courtesy: nothing is waited for, nothing is repeated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..worker.messages import SharedReservations
from ..worker.wire import pack

CALL_TIMEOUT_S = 2.0
AWAY_S = 1.0
"""A peer that has not answered is told nothing for so long."""

MOST_WAITING = 4_096
"""Reservations, and as many ends of them, that wait while a call is under way. Beyond it the oldest are dropped."""

logger = logging.getLogger(__name__)


class Peer:
    """``find()`` gives the other router's actor or raises ValueError; it may block."""

    def __init__(self, find: Callable[[], Any]) -> None:
        self._find = find
        self._actor: Any = None
        self._waiting: SharedReservations | None = None
        self._sender: asyncio.Task[None] | None = None
        self._away_until_s = 0.0
        """On the event loop's clock."""

    def tell(self, shared: SharedReservations) -> None:
        """Send it, after what is on its way, and together with what comes meanwhile."""
        if asyncio.get_running_loop().time() < self._away_until_s:
            return
        self._waiting = shared if self._waiting is None else _joined(self._waiting, shared)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while (shared := self._waiting) is not None:
            self._waiting = None
            try:
                self._actor = self._actor or await asyncio.to_thread(self._find)
                await asyncio.wait_for(self._actor.shared.remote(pack(shared)), CALL_TIMEOUT_S)
            except Exception as error:  # whatever it is, the peer lacks no more than it does after a restart
                logger.debug("a peer was not told: %s", type(error).__name__)
                self._actor, self._waiting = None, None
                self._away_until_s = asyncio.get_running_loop().time() + AWAY_S


def _joined(first: SharedReservations, second: SharedReservations) -> SharedReservations:
    """As one: what it gives up is given up before what it reserves is reserved."""
    ended = set(second.cancelled)
    kept = [each for each in first.reservations if each.query.request_id not in ended]
    return replace(
        second,
        reservations=(*kept, *second.reservations)[-MOST_WAITING:],
        cancelled=(*first.cancelled, *second.cancelled)[-MOST_WAITING:],
    )
