"""ClusterService: what a gateway's HTTP layer asks of the cluster, answered by the router and the worker groups.

A request that loses its worker group goes on at another one: prompt and output so far are submitted again, nothing
that was delivered changes, and the tokens that follow are those that the first group would have given.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from ..worker.errors import Unavailable
from ..worker.messages import (
    Branch,
    FinishReason,
    GroupEntry,
    Request,
    RouteDecision,
    RouteQuery,
    SequenceUpdate,
)
from ..worker.routing_hash import RoutingHasher
from .api.metrics import GatewayMetrics, merge_metrics
from .api.service import GenerationRequest, Readiness, Route, TokenDelta
from .group_client import GroupClient, GroupLost, TokenStream
from .router_client import REGISTRY_PERIOD_S, RouterAway, RouterClient

MOST_ATTEMPTS = 3
"""A request that so many groups died of is not given to another."""

ROUTE_PATIENCE_S = 30.0
"""How long a request whose group died waits for another one, and a new one for the first."""

RETRY_PAUSE_S = 0.2

EMPTY_REGISTRY_S = 8.0
"""For so long after it had an entry, an empty registry is taken for that of a router that has just started."""

REVIVAL_S = 10.0
"""A group that seemed dead is tried again after this; a dead one has left the registry by then."""

logger = logging.getLogger(__name__)


class ClusterService:
    """One per gateway. ``run`` keeps the registry fresh; it must be running."""

    def __init__(self, gateway_id: str, router: RouterClient, hasher: RoutingHasher, metrics: GatewayMetrics) -> None:
        self.gateway_id = gateway_id
        self.metrics = metrics
        self.hasher = hasher
        self._router = router
        self._entries: dict[int, GroupEntry] = {}
        """The registry, by generation."""
        self._clients: dict[int, GroupClient] = {}
        """Of all groups in the registry, and of those that have left it while requests were under way there."""
        self._registered_at_s = 0.0
        """When the registry last had an entry, on the event loop's clock."""

    # ---- the registry ----

    async def run(self) -> None:
        """Refresh the registry for ever."""
        while True:
            try:
                await self.refresh()
            except RouterAway:
                pass
            except Exception:  # nothing else would refresh the registry any more
                logger.exception("the registry could not be refreshed")
            await asyncio.sleep(REGISTRY_PERIOD_S)

    async def refresh(self) -> None:
        """Fetch the registry now. Raises RouterAway; what is known then stays.

        A registry that has just become empty is not believed: a new router is empty until the groups have reported.
        """
        registry = await self._router.registry()
        now = asyncio.get_running_loop().time()
        if registry:
            self._registered_at_s = now
        elif now - self._registered_at_s < EMPTY_REGISTRY_S:
            return
        self._entries = {entry.generation: entry for entry, _ in registry}
        fresh = {entry.generation: self._client_of(entry.generation, leader) for entry, leader in registry}
        busy = {generation: client for generation, client in self._clients.items() if not client.is_idle}
        self._clients = busy | fresh

    def _client_of(self, generation: int, leader: Any) -> GroupClient:
        """The one there is, or a new one; also for a group that seemed dead and is still in the registry later on."""
        known = self._clients.get(generation)
        if known is not None:
            lost_since_s = known.lost_since_s
            if lost_since_s is None or asyncio.get_running_loop().time() - lost_since_s < REVIVAL_S:
                return known
        return GroupClient(self.gateway_id, generation, leader)

    def _serving(self) -> list[tuple[GroupEntry, GroupClient]]:
        """Groups that take new requests, as far as is known here."""
        pairs = [(entry, self._clients[generation]) for generation, entry in self._entries.items()]
        return [(entry, client) for entry, client in pairs if not entry.draining and not client.lost]

    # ---- GenerationService ----

    async def start(self, request: GenerationRequest) -> ClusterGeneration:
        """Route and submit. Raises Unavailable when no group can take the request in time."""
        end = None if request.timeout_s is None else asyncio.get_running_loop().time() + request.timeout_s
        generation = ClusterGeneration(self, self._to_wire(request), request.session_id, end)
        await generation.place()
        return generation

    async def metrics_text(self) -> str:
        """Metrics of the router, all worker groups and all other gateways."""
        texts: dict[str, str] = {}
        with contextlib.suppress(RouterAway):
            texts = await self._router.cluster_metrics()
        texts.pop(f"gateway:{self.gateway_id}", None)
        return merge_metrics(texts.values())

    async def readiness(self) -> Readiness:
        with contextlib.suppress(RouterAway):
            await self.refresh()
        serving = self._serving()
        if not serving:
            return Readiness(False, "no worker group is ready")
        return Readiness(True, f"{len(serving)} worker group{'s' if len(serving) > 1 else ''} ready")

    def _to_wire(self, request: GenerationRequest) -> Request:
        hashes = self.hasher.hash_blocks(request.prompt_token_ids, request.cache_salt)
        return Request(
            request_id=request.request_id,
            gateway_id=self.gateway_id,
            model=request.model,
            prompt_token_ids=request.prompt_token_ids,
            routing_hashes=tuple(hashes.tolist()),
            sampling=request.sampling,
            priority=request.priority,
            timeout_s=request.timeout_s,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
        )

    # ---- placement ----

    async def submit(
        self, request: Request, session_id: str | None, dead: tuple[int, ...], patience_s: float
    ) -> Placement:
        """Give ``request`` to the group that the router chooses, not to one in ``dead``. Raises Unavailable."""
        end = asyncio.get_running_loop().time() + patience_s
        avoid = dead
        while True:
            try:
                decision = await self._decide(request, session_id, avoid)
                if (client := await self._client(decision)) is not None:
                    placed = replace(request, expected_cached_tokens=decision.expected_cached_tokens)
                    return Placement(decision, client, await client.submit(placed))
            except GroupLost:
                pass
            except BaseException:
                self._router.cancel(request.request_id)
                raise
            self._router.cancel(request.request_id)
            if decision.group is not None:
                avoid = (*avoid, decision.generation)
                continue
            avoid = dead  # nobody else is left: one that did not answer a moment ago may do so now
            if asyncio.get_running_loop().time() > end:
                retry_after_s = decision.retry_after_s or 1.0
                raise Unavailable(
                    f"no worker group can take the request: {decision.reason}", retry_after_s=retry_after_s
                )
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _decide(self, request: Request, session_id: str | None, avoid: tuple[int, ...]) -> RouteDecision:
        query = RouteQuery(
            request_id=request.request_id,
            model=request.model,
            routing_hashes=request.routing_hashes,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            priority=request.priority,
            timeout_s=request.timeout_s,
            session_id=session_id,
            tenant=request.tenant,
            excluded_generations=avoid,
        )
        try:
            return await self._router.route(query)
        except RouterAway:
            self.metrics.fallback_routes.inc()
            return self._least_loaded(query)

    def _least_loaded(self, query: RouteQuery) -> RouteDecision:
        """Without the router: the group of which this gateway has asked the fewest tokens."""
        able = [
            (client.outstanding_tokens, entry)
            for entry, client in self._serving()
            if entry.model == query.model and entry.generation not in query.excluded_generations
        ]
        if not able:
            return RouteDecision(query.request_id, None, 0, 0, "router_away")
        entry = min(able, key=lambda pair: (pair[0], pair[1].generation))[1]
        return RouteDecision(query.request_id, entry.group, entry.generation, 0, "router_away")

    async def _client(self, decision: RouteDecision) -> GroupClient | None:
        if decision.group is None:
            return None
        if decision.generation not in self._clients:
            with contextlib.suppress(RouterAway):
                await self.refresh()
        client = self._clients.get(decision.generation)
        return None if client is None or client.lost else client


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request is now."""

    decision: RouteDecision
    client: GroupClient
    stream: TokenStream


@dataclass(slots=True)
class ClusterGeneration:
    """One request under way, over as many groups as it takes."""

    service: ClusterService
    request: Request
    session_id: str | None
    deadline_s: float | None
    """On the event loop's clock."""
    output: list[int] = field(default_factory=list)
    dead: tuple[int, ...] = ()
    placement: Placement | None = None
    cached_told: bool = False

    @property
    def route(self) -> Route:
        if self.placement is None:
            raise RuntimeError("the request has not been placed")
        decision = self.placement.decision
        return Route(decision.group or "", decision.expected_cached_tokens, decision.reason)

    async def place(self) -> None:
        """Submit what there is to a group. Raises Unavailable."""
        remaining_s = self._remaining_s()
        patience_s = ROUTE_PATIENCE_S if remaining_s is None else min(ROUTE_PATIENCE_S, remaining_s)
        self.request = replace(self.request, timeout_s=remaining_s)
        self.placement = await self.service.submit(self.request, self.session_id, self.dead, patience_s)

    async def tokens(self) -> AsyncIterator[TokenDelta]:
        """New tokens until a delta with a finish reason."""
        while True:
            try:
                async for delta in self._from_group():
                    yield delta
                    if delta.finish_reason is not None:
                        return
            except GroupLost as loss:
                if (error := await self._move(loss)) is not None:
                    yield TokenDelta((), FinishReason.ERROR, None, error)
                    return

    async def _from_group(self) -> AsyncIterator[TokenDelta]:
        placement = self._placed()
        async for update in placement.stream.updates():
            self.output.extend(update.token_ids)
            if update.finish_reason is not None:
                placement.client.forget(self.request.request_id)
            yield TokenDelta(update.token_ids, update.finish_reason, self._cached_once(update), update.error)

    def _cached_once(self, update: SequenceUpdate) -> int | None:
        """Cached tokens go with the first delta; those of a later group would count a prompt twice."""
        if self.cached_told:
            return None
        self.cached_told = update.num_cached_tokens is not None
        return update.num_cached_tokens

    async def _move(self, loss: GroupLost) -> str | None:
        """Go on at another group; why not, when that fails."""
        if loss.is_dead:
            self.dead = (*self.dead, self._placed().client.generation)
        if self.request.attempt >= MOST_ATTEMPTS:
            return f"{MOST_ATTEMPTS} worker groups were lost while they worked on this request"
        self.service.metrics.failovers.inc()
        self.request = replace(
            self.request,
            branches=(Branch(0, tuple(self.output)),),
            attempt=self.request.attempt + 1,
        )
        try:
            await self.place()
        except Unavailable as error:
            return str(error)
        return None

    def _remaining_s(self) -> float | None:
        """What is left of the request's time."""
        if self.deadline_s is None:
            return None
        return max(0.0, self.deadline_s - asyncio.get_running_loop().time())

    def _placed(self) -> Placement:
        if self.placement is None:
            raise RuntimeError("the request has not been placed")
        return self.placement

    def abort(self) -> None:
        """Free what the request holds; harmless when it is over."""
        if self.placement is not None:
            self.placement.client.abort(self.request.request_id)
