"""The router as an actor: ``ray.remote(RouterCore)``. Bytes in, bytes out, and the leaders' handles beside them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..worker.logs import LogFormat, configure_logs
from ..worker.messages import (
    GroupReport,
    Registry,
    RouteDecision,
    RouteDecisions,
    RouteQueries,
    RouteQuery,
    SharedReservations,
)
from ..worker.process_metrics import LoopLag, ProcessMetrics, render
from ..worker.wire import pack, unpack
from .closing import Closing
from .config import RouterConfig
from .peers import Peer
from .router import Router
from .turn_mail import TurnMail

SOURCE_TIMEOUT_S = 10.0
"""Metrics of a group or gateway that has been silent for so long are not given out any more."""

GATEWAY_SILENCE_S = 15.0
"""A gateway that has not asked for its turns for so long is gone; its queued requests are given up."""

TURNS_PERIOD_S = 0.05
"""So often the queue is looked at while nothing else gives cause to."""

_POLLS_IN_SILENCE = 3
"""A poll for turns is answered so often, news or not, within the time after which its gateway would count as gone."""

_BULKY_BYTES = 1 << 16
"""Of a report: queries are answered before another one of this size is taken in."""

_ERROR = "error"
"""The reason that is given for a query that the router failed on."""

_SERIES_NAME = re.compile(r"^([A-Za-z_:][\w:]*)(\{?)", re.MULTILINE)

logger = logging.getLogger(__name__)


class RouterCore:
    """Holds the one Router. All methods run on the actor's event loop, one at a time.

    ``find_peers`` give the actors of the other routers, or raise ValueError; they may block. ``name`` tells this
    router's metrics from theirs, None when there are no others. ``logs``: level and form of what this process
    logs, None: as it is.
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        name: str | None = None,
        find_peers: Iterable[Callable[[], Any]] = (),
        router: Router | None = None,
        logs: tuple[str, LogFormat] | None = None,
    ) -> None:
        if logs is not None:
            configure_logs(*logs, {"role": "router", "router": name or "0"})
        self._clock = clock
        self._name = name
        self._router = router or Router(config or RouterConfig(), random.Random())
        self._peers = [Peer(find) for find in find_peers]
        self._mail = TurnMail(random.Random())
        self._turner: asyncio.Task[None] | None = None
        self._bulk = asyncio.Lock()
        self._closing = Closing(self._router)
        self._leaders: dict[int, Any] = {}
        self._lag = LoopLag()
        self._process = ProcessMetrics({"role": "router"}, self._lag)
        self._metrics: dict[str, tuple[str, float]] = {}
        """Source → its latest metrics text, and when it was last heard of."""

    # ---- what gateways call ----

    async def route(self, packed: bytes) -> bytes:
        """``RouteQueries`` → ``RouteDecisions``. What is queued is decided later, see ``turns``."""
        queries, now = unpack(packed, RouteQueries), self._clock()
        with self._shielded("cancel"):
            self._router.cancel(queries.cancelled, now)
        decisions = RouteDecisions(tuple([self._decide(queries.gateway_id, query, now) for query in queries.queries]))
        self._note_queued(queries, decisions, now)
        self._pass_on(now)
        return pack(decisions)

    async def turns(self, gateway_id: str, acknowledged: int, timeout_s: float) -> bytes:
        """Packed ``RouteDecisions``: what has become of the gateway's queued queries since the number that it
        acknowledges; waits up to ``timeout_s`` for something. See ``TurnMail``."""
        news = self._mail.news(gateway_id, acknowledged, self._clock())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), min(timeout_s, GATEWAY_SILENCE_S / _POLLS_IN_SILENCE))
        return pack(self._mail.take(gateway_id, acknowledged, self._clock()))

    async def registry(self) -> tuple[bytes, list[Any]]:
        """The packed ``Registry`` and the leader's handle of each of its entries, in the same order."""
        entries = self._router.registry(self._clock()).entries
        self._leaders = {entry.generation: self._leaders[entry.generation] for entry in entries}
        if self._closing.has_begun:
            entries = tuple(replace(entry, draining=True) for entry in entries)
        return pack(Registry(entries)), [self._leaders[entry.generation] for entry in entries]

    async def report_gateway(self, gateway_id: str, text: str) -> None:
        """A gateway's metrics; an empty text means unchanged."""
        self._hear(f"gateway:{gateway_id}", text, self._clock())

    async def cluster_metrics(self) -> dict[str, str]:
        """Source → metrics text: ``router``, and each ``group:…`` and ``gateway:…`` heard of lately."""
        oldest = self._clock() - SOURCE_TIMEOUT_S
        self._metrics = {source: heard for source, heard in self._metrics.items() if heard[1] > oldest}
        texts = {source: text for source, (text, _) in self._metrics.items() if text}
        own = self._router.metrics_text() + render(self._process)
        return {"router": own if self._name is None else _labelled(own, self._name), **texts}

    async def explain(self, limit: int) -> list[dict[str, Any]]:
        """The last decisions, newest first, each with its age in seconds."""
        now = self._clock()
        return [decision | {"age_s": now - decision["made_at_s"]} for decision in self._router.explain(limit)]

    # ---- what worker groups call ----

    async def outlook(self, model: str) -> tuple[float, float] | None:
        """Seconds until a new request's first token, and the share of free blocks; see ``Outlook``."""
        found = self._router.outlook(model)
        return None if found is None else (found.expected_ttft_s, found.free_share)

    # ---- what leaders call ----

    async def report(self, packed: bytes, leader_handle: Any) -> bool:
        """A ``GroupReport`` from the leader whose actor handle this is; True asks for a snapshot of its cache.

        The leader may take the report, its progress included, as acknowledged when the call returns.
        """
        if len(packed) < _BULKY_BYTES:
            return self._take_in(packed, leader_handle)
        async with self._bulk:
            await asyncio.sleep(0)
            return self._take_in(packed, leader_handle)

    # ---- what the other routers call ----

    async def shared(self, packed: bytes) -> None:
        """``SharedReservations`` of one of them."""
        shared = unpack(packed, SharedReservations)
        with self._shielded("adopt"):
            self._router.adopt(shared, self._clock())

    # ---- what the owner calls ----

    async def drain(self) -> None:
        """The whole application is about to stop: the registry says so of every group, gateways are not ready, and new
        requests are refused."""
        self._closing.begin()

    async def end(self) -> None:
        """There is no more time: what is under way is refused too when it comes to move."""
        self._closing.end()

    async def num_under_way(self) -> int:
        """Requests that run or wait, as far as is known here."""
        return self._closing.num_under_way

    async def health(self) -> bool:
        """Answers as long as the loop runs."""
        return True

    async def watch(self) -> None:
        """Never returns: who waits for it learns of this actor's end. Meanwhile it measures the event loop."""
        await self._lag.run()

    # ---- inside ----

    @contextlib.contextmanager
    def _shielded(self, what: str) -> Iterator[None]:
        """One query or report that the router fails on does not disturb the others: to a caller that gets an error for
        an answer, the router is away."""
        try:
            yield
        except Exception:
            logger.exception("the router failed: %s", what)
            self._router.counters.failures[what] += 1

    def _decide(self, gateway_id: str, query: RouteQuery, now: float) -> RouteDecision:
        if (refusal := self._closing.refusal(query)) is not None:
            return refusal
        with self._shielded("route"):
            decision = self._router.route(RouteQueries(gateway_id, (query,)), now).decisions[0]
            _log(query, decision)
            return decision
        with self._shielded("cancel"):
            self._router.cancel((query.request_id,), now)
        detail = "the router failed on the request; its log says more"
        return RouteDecision(query.request_id, None, 0, 0, _ERROR, retry_after_s=1.0, detail=detail)

    def _take_in(self, packed: bytes, leader_handle: Any) -> bool:
        report, now = unpack(packed, GroupReport), self._clock()
        self._leaders[report.generation] = leader_handle
        self._hear(f"group:{report.group}", report.metrics, now)
        wants_snapshot = False
        with self._shielded("report"):
            wants_snapshot = self._router.report(report, now)
        self._pass_on(now)
        return wants_snapshot

    def _hear(self, source: str, text: str, now: float) -> None:
        known = self._metrics.get(source, ("", now))[0]
        self._metrics[source] = (text or known, now)

    def _note_queued(self, queries: RouteQueries, decisions: RouteDecisions, now: float) -> None:
        gateway_id = queries.gateway_id
        self._mail.forget(gateway_id, (*queries.cancelled, *[query.request_id for query in queries.queries]))
        if any(decision.queued for decision in decisions.decisions):
            self._mail.expect(gateway_id, now)

    def _pass_on(self, now: float) -> None:
        """Tell gateways whose turn it is, and the other routers what was decided."""
        with self._shielded("take_turns"):
            for gateway_id, decisions in self._router.take_turns(now).items():
                self._mail.put(gateway_id, decisions, now)
        if (shared := self._router.take_shared()) is not None:
            for peer in self._peers:
                peer.tell(shared)
        if self._is_waited_for and (self._turner is None or self._turner.done()):
            self._turner = asyncio.create_task(self._look_after_queue())

    @property
    def _is_waited_for(self) -> bool:
        return self._router.num_queued > 0 or not self._mail.is_empty

    async def _look_after_queue(self) -> None:
        """As long as anybody waits: time alone ends some waits, and some gateways do not come for their turns."""
        while self._is_waited_for:
            await asyncio.sleep(TURNS_PERIOD_S)
            now = self._clock()
            with self._shielded("cancel"):
                self._give_up_silent(now)
            self._pass_on(now)

    def _give_up_silent(self, now: float) -> None:
        """What gateways have queued that do not come for their turns, and what they were never told of."""
        if silent := self._mail.drop_silent(now, GATEWAY_SILENCE_S):
            never_told = [request_id for request_ids in silent.values() for request_id in request_ids]
            self._router.cancel((*self._router.queued_of(silent), *never_told), now)


def _log(query: RouteQuery, decision: RouteDecision) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        about = {"request_id": query.request_id, "trace": query.trace, "attempt": query.attempt}
        made = {"group": decision.group, "reason": decision.reason, "queued": decision.queued}
        logger.debug("decided", extra={"fields": about | made})


def _labelled(text: str, router: str) -> str:
    """The same metrics, each series with a label that says whose it is."""
    return _SERIES_NAME.sub(lambda found: f'{found[1]}{{router="{router}"' + ("," if found[2] else "}"), text)
