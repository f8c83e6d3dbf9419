"""RouterClient: a gateway's line to the router.

Route calls of about a millisecond travel as one. The registry of worker groups is fetched every second and kept, so
that a gateway goes on when the router is away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError

from ..worker.messages import (
    GroupEntry,
    Registry,
    RouteDecision,
    RouteDecisions,
    RouteQueries,
    RouteQuery,
)
from ..worker.wire import WireError, pack, unpack

BUNDLE_S = 0.001
CALL_TIMEOUT_S = 2.0
REGISTRY_PERIOD_S = 1.0
AWAY_S = 2.0
"""Requests do not wait for a router that has not answered for so long; the registry's next call may end it early."""

logger = logging.getLogger(__name__)


class RouterAway(Exception):
    """The router did not answer in time."""


class RouterClient:
    """``find_router()`` gives the router's actor or raises ValueError; it is asked again when that may be another."""

    def __init__(self, gateway_id: str, find_router: Callable[[], Any]) -> None:
        self._gateway_id = gateway_id
        self._find_router = find_router
        self._actor: Any = None
        self._away_until_s = 0.0
        """On the event loop's clock: the router has just not answered, and is not waited for again."""
        self._waiting: list[tuple[RouteQuery, asyncio.Future[RouteDecision]]] = []
        self._cancelled: list[str] = []
        self._flusher: asyncio.Task[None] | None = None

    async def route(self, query: RouteQuery) -> RouteDecision:
        """The group for one request, reserved for it. Raises RouterAway."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._away_until_s:
            raise RouterAway("route: the router has not answered a moment ago")
        future: asyncio.Future[RouteDecision] = loop.create_future()
        self._waiting.append((query, future))
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush_soon())
        return await future

    def cancel(self, request_id: str) -> None:
        """A reserved request did not reach its group: say so with the next call."""
        self._cancelled.append(request_id)

    async def registry(self) -> list[tuple[GroupEntry, Any]]:
        """All worker groups with their leaders' handles. Raises RouterAway."""
        data, leaders = await self._call("registry")
        return list(zip(unpack(data, Registry).entries, leaders, strict=True))

    async def report_metrics(self, text: str) -> None:
        """Give this gateway's metrics to the router, which keeps them for all gateways. Raises RouterAway."""
        await self._call("report_gateway", self._gateway_id, text)

    async def cluster_metrics(self) -> dict[str, str]:
        """Prometheus texts by source. Raises RouterAway."""
        return dict(await self._call("cluster_metrics"))

    async def _flush_soon(self) -> None:
        await asyncio.sleep(BUNDLE_S)
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            cancelled, self._cancelled = self._cancelled, []
            await self._flush(waiting, tuple(cancelled))

    async def _flush(
        self, waiting: list[tuple[RouteQuery, asyncio.Future[RouteDecision]]], cancelled: tuple[str, ...]
    ) -> None:
        queries = RouteQueries(self._gateway_id, tuple(query for query, _ in waiting), cancelled)
        try:
            answer = unpack(await self._call("route", pack(queries)), RouteDecisions)
        except (RouterAway, WireError) as error:
            self._cancelled.extend(cancelled)
            for _, future in waiting:
                if not future.done():
                    future.set_exception(RouterAway(str(error)))
            return
        for (_, future), decision in zip(waiting, answer.decisions, strict=True):
            if not future.done():
                future.set_result(decision)

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            if self._actor is None:
                find = asyncio.to_thread(self._find_router)
                self._actor = await asyncio.wait_for(find, CALL_TIMEOUT_S)
            answer = await asyncio.wait_for(getattr(self._actor, method).remote(*args), CALL_TIMEOUT_S)
            self._away_until_s = 0.0
            return answer
        except (RayError, ValueError, TimeoutError) as error:
            self._actor = None
            self._away_until_s = asyncio.get_running_loop().time() + AWAY_S
            raise RouterAway(f"{method}: {type(error).__name__}") from error
