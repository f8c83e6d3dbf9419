"""ClusterService: what a gateway's HTTP layer asks of the cluster, answered by the router and the worker groups."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..worker.errors import Overloaded, Unavailable
from ..worker.messages import Branch, GroupEntry, Request, RouteDecision, RouteQuery
from ..worker.routing_hash import RoutingHasher
from .api.metrics import GatewayMetrics, merge_metrics
from .api.service import GenerationRequest, Readiness
from .generation import ClusterGeneration, Placement
from .group_client import GroupClient, GroupFull, GroupLost, num_sequences
from .router_client import REGISTRY_PERIOD_S, RouterAway, RouterClient

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
        """Route and submit. Raises Unavailable when no group can take it in time, Overloaded when all are full."""
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

    async def reset_prefix_cache(self) -> Mapping[str, int | None]:
        """Group → blocks that its cache forgot, None without an answer. Raises Unavailable when none answers."""
        with contextlib.suppress(RouterAway):
            await self.refresh()
        groups = {entry.group: self._clients[generation] for generation, entry in self._entries.items()}
        numbers = await asyncio.gather(*(client.reset_prefix_cache() for client in groups.values()))
        if all(number is None for number in numbers):
            raise Unavailable("no worker group could be reached: no prefix cache was reset")
        return dict(zip(groups, numbers, strict=True))

    def _to_wire(self, request: GenerationRequest) -> Request:
        return Request(
            request_id=request.request_id,
            gateway_id=self.gateway_id,
            model=request.model,
            prompt_token_ids=request.prompt_token_ids,
            routing_hashes=self._hashes(request),
            sampling=request.sampling,
            branches=tuple(Branch(index) for index in range(request.num_branches)),
            priority=request.priority,
            timeout_s=request.timeout_s,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            use_prefix_cache=request.use_prefix_cache,
            queue_timeout_s=request.queue_timeout_s,
        )

    def _hashes(self, request: GenerationRequest) -> tuple[int, ...]:
        """None for a request that is to find no block and leave none: the router then expects neither."""
        if not request.use_prefix_cache:
            return ()
        return tuple(self.hasher.hash_blocks(request.prompt_token_ids, request.cache_salt).tolist())

    # ---- placement ----

    async def submit(
        self, request: Request, session_id: str | None, dead: tuple[int, ...], patience_s: float
    ) -> Placement:
        """Give ``request`` to the group that the router chooses, not to one in ``dead``.

        A group whose queue is full is passed over. When all are full a new request is refused at once; one that was
        under way waits for room, up to ``patience_s``. Raises Unavailable, or Overloaded if it is for full queues.
        """
        end = asyncio.get_running_loop().time() + patience_s
        avoid = dead
        refusals: list[GroupFull] = []
        while True:
            try:
                decision = await self._decide(request, session_id, avoid)
                if (client := await self._client(decision)) is not None:
                    placed = replace(request, expected_cached_tokens=decision.expected_cached_tokens)
                    return Placement(decision, client, await client.submit(placed))
            except GroupFull as refusal:
                refusals.append(refusal)
            except GroupLost:
                pass
            except BaseException:
                self._router.cancel(request.request_id)
                raise
            self._router.cancel(request.request_id)
            if decision.group is not None:
                avoid = (*avoid, decision.generation)
                continue
            patience_is_over = asyncio.get_running_loop().time() > end
            if patience_is_over or (refusals and request.attempt == 1):
                raise _not_placed(decision, refusals)
            avoid = dead  # nobody else is left: one that did not answer a moment ago may do so now
            refusals = []
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
            num_branches=num_sequences(request),
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


def _not_placed(decision: RouteDecision, refusals: list[GroupFull]) -> Overloaded | Unavailable:
    """Why no group has taken a request: those that could have are full, or there are none."""
    if not refusals:
        message = f"no worker group can take the request: {decision.reason}"
        return Unavailable(message, retry_after_s=decision.retry_after_s or 1.0)
    soonest = min(refusals, key=lambda refusal: refusal.retry_after_s)
    return Overloaded(str(soonest), retry_after_s=soonest.retry_after_s)
