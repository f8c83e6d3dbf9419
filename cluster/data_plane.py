"""ClusterService: what a gateway's HTTP layer asks of the cluster, answered by the router and the worker groups."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..worker.errors import Unavailable
from ..worker.messages import Request
from ..worker.routing_hash import RoutingHasher, pack_hashes
from .api.metrics import GatewayMetrics, merge_metrics
from .api.service import GenerationRequest, Readiness, RouteWishes
from .generation import ClusterGeneration, Placement, wire_request
from .registry import GroupRegistry
from .router_client import RouterClient
from .router_lines import RouterAway
from .submitter import Submitter
from .trace_recorder import TraceRecorder


class ClusterService:
    """One per gateway. ``groups.run`` must be running."""

    def __init__(
        self,
        gateway_id: str,
        router: RouterClient,
        hasher: RoutingHasher,
        metrics: GatewayMetrics,
        recorder: TraceRecorder | None = None,
    ) -> None:
        self.gateway_id = gateway_id
        self.metrics = metrics
        self.hasher = hasher
        self._router = router
        self._recorder = recorder
        self.groups = GroupRegistry(gateway_id, router)
        self._submitter = Submitter(router, self.groups, metrics)

    # ---- GenerationService ----

    async def start(self, request: GenerationRequest) -> ClusterGeneration:
        """Route and submit. Raises Unavailable when no group can take it in time, Overloaded when all are full or the
        router does not let it wait for one."""
        now = asyncio.get_running_loop().time()
        end = None if request.timeout_s is None else now + request.timeout_s
        wire = wire_request(request, self.gateway_id, self._hashes(request))
        generation = ClusterGeneration(self, wire, request.wishes, end, now)
        await generation.place()
        return generation

    async def metrics_text(self) -> str:
        """Metrics of the router, all worker groups and all other gateways."""
        texts: dict[str, str] = {}
        with contextlib.suppress(RouterAway):
            texts = await self._router.cluster_metrics()
        texts.pop(f"gateway:{self.gateway_id}", None)
        return merge_metrics(texts.values())

    async def explain(self, limit: int) -> Sequence[Mapping[str, Any]]:
        """The last decisions of the routers, newest first. Raises Unavailable."""
        try:
            return await self._router.explain(limit)
        except RouterAway as error:
            raise Unavailable("the router does not answer at present") from error

    async def readiness(self) -> Readiness:
        await self.groups.try_refresh()
        serving = self.groups.serving()
        if not serving:
            return Readiness(False, "no worker group is ready")
        return Readiness(True, f"{len(serving)} worker group{'s' if len(serving) > 1 else ''} ready")

    async def reset_prefix_cache(self) -> Mapping[str, int | None]:
        """Group → blocks that its cache forgot, None without an answer. Raises Unavailable when none answers."""
        await self.groups.try_refresh()
        groups = {entry.group: self.groups.clients[generation] for generation, entry in self.groups.entries.items()}
        numbers = await asyncio.gather(*(client.reset_prefix_cache() for client in groups.values()))
        if all(number is None for number in numbers):
            raise Unavailable("no worker group could be reached: no prefix cache was reset")
        return dict(zip(groups, numbers, strict=True))

    def _hashes(self, request: GenerationRequest) -> bytes:
        """Empty for a request that is to find no block and leave none: the router then expects neither."""
        if not request.use_prefix_cache:
            return b""
        return pack_hashes(self.hasher.hash_blocks(request.prompt_token_ids, request.cache_salt))

    # ---- Placer ----

    async def submit(
        self, request: Request, wishes: RouteWishes, dead: tuple[int, ...], patience_s: float
    ) -> Placement:
        return await self._submitter.submit(request, wishes, dead, patience_s)

    def ended(self, generation: ClusterGeneration) -> None:
        """A request that a group took is over: it is recorded."""
        if self._recorder is not None:
            self._recorder.add(
                generation.request, generation.arrival_s, generation.num_branches, generation.num_output_tokens
            )
