"""The router as an actor: ``ray.remote(RouterCore)``. Bytes in, bytes out, and the leaders' handles beside them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from ..worker.messages import GroupReport, RouteQueries
from ..worker.wire import pack, unpack
from .router import Router, RouterConfig

SOURCE_TIMEOUT_S = 10.0
"""Metrics of a group or gateway that has been silent for so long are not given out any more."""


class RouterCore:
    """Holds the one Router. All methods run on the actor's event loop, one at a time."""

    def __init__(self, config: RouterConfig | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._router = Router(config or RouterConfig(), random.Random())
        self._draining = False
        self._leaders: dict[int, Any] = {}
        self._metrics: dict[str, tuple[str, float]] = {}
        """Source → its latest metrics text, and when it was last heard of."""

    async def route(self, packed: bytes) -> bytes:
        """``RouteQueries`` → ``RouteDecisions``."""
        return pack(self._router.route(unpack(packed, RouteQueries), self._clock()))

    async def report(self, packed: bytes, leader_handle: Any) -> bool:
        """A ``GroupReport`` from the leader whose actor handle this is; True asks for a snapshot of its cache.

        The leader may take the report, its progress included, as acknowledged when the call returns.
        """
        report, now = unpack(packed, GroupReport), self._clock()
        self._leaders[report.generation] = leader_handle
        self._hear(f"group:{report.group}", report.metrics, now)
        return self._router.report(report, now)

    async def report_gateway(self, gateway_id: str, text: str) -> None:
        """A gateway's metrics; an empty text means unchanged."""
        self._hear(f"gateway:{gateway_id}", text, self._clock())

    async def registry(self) -> tuple[bytes, list[Any]]:
        """The packed ``Registry`` and the leader's handle of each of its entries, in the same order."""
        registry = self._router.registry(self._clock())
        self._leaders = {entry.generation: self._leaders[entry.generation] for entry in registry.entries}
        return pack(registry), [self._leaders[entry.generation] for entry in registry.entries]

    async def cluster_metrics(self) -> dict[str, str]:
        """Source → metrics text: ``router``, and each ``group:…`` and ``gateway:…`` heard of lately."""
        oldest = self._clock() - SOURCE_TIMEOUT_S
        self._metrics = {source: heard for source, heard in self._metrics.items() if heard[1] > oldest}
        texts = {source: text for source, (text, _) in self._metrics.items() if text}
        return {"router": self._router.metrics_text(), **texts}

    async def explain(self, limit: int) -> list[dict[str, Any]]:
        """The last decisions, newest first."""
        return self._router.explain(limit)

    async def drain(self) -> None:
        """The whole application is about to stop: the registry says so of every group, and gateways are not ready."""
        self._draining = True

    async def health(self) -> bool:
        """Answers as long as the loop runs."""
        return True

    def _hear(self, source: str, text: str, now: float) -> None:
        known = self._metrics.get(source, ("", now))[0]
        self._metrics[source] = (text or known, now)
