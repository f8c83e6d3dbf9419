"""ClusterService: what a gateway's HTTP layer asks of the cluster, answered by the router and the worker groups."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping, Sequence
from typing import Any

from ..worker.errors import InvalidRequest, Unavailable
from ..worker.messages import Request
from ..worker.pool_state import PoolState
from ..worker.routing_hash import RoutingHasher, pack_hashes
from .api.metrics import merge_metrics
from .api.model_metrics import ModelsMetrics
from .api.service import GenerationRequest, Readiness, RouteWishes
from .generation import ClusterGeneration, Past, Placement, wire_request
from .registry import GroupRegistry
from .router_client import RouterClient
from .router_lines import RouterAway
from .submitter import Submitter
from .trace_recorder import TraceRecorder
from .way_in import WayIn


class ClusterService:
    """One per gateway. ``groups.run`` must be running."""

    def __init__(
        self,
        gateway_id: str,
        router: RouterClient,
        hasher: RoutingHasher,
        metrics: ModelsMetrics,
        recorders: Mapping[str, TraceRecorder] | None = None,
        tls: ssl.SSLContext | None = None,
        way_in: WayIn | None = None,
    ) -> None:
        """``tls``: of the lines to the worker groups' leaders. ``way_in``: None where no proxy is in front."""
        self.gateway_id = gateway_id
        self.metrics = metrics
        self.hasher = hasher
        self._router = router
        self._recorders = recorders or {}
        self._way_in = way_in
        self.groups = GroupRegistry(gateway_id, router, tls)
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
        served = {entry.model for entry, _ in serving}
        if missing := [model for model in self.metrics.models if model not in served]:
            which = f" of {', '.join(missing)}" if len(self.metrics.models) > 1 else ""
            return Readiness(False, f"no worker group{which} is ready")
        if self._way_in is not None and not await self._way_in.is_open():
            return Readiness(False, "the proxy does not send every connection here yet")
        return Readiness(True, f"{len(serving)} worker group{'s' if len(serving) > 1 else ''} ready")

    async def reset_prefix_cache(self) -> Mapping[str, int | None]:
        """Group → blocks that its cache forgot, None without an answer. Raises Unavailable when none answers."""
        await self.groups.try_refresh()
        groups = {entry.group: self.groups.clients[generation] for generation, entry in self.groups.entries.items()}
        numbers = await asyncio.gather(*(client.reset_prefix_cache() for client in groups.values()))
        if all(number is None for number in numbers):
            raise Unavailable("no worker group could be reached: no prefix cache was reset")
        return dict(zip(groups, numbers, strict=True))

    async def pools(self, most: int) -> Mapping[str, PoolState | None]:
        """Group → what its block pool looks like, None for one that does not answer; of the first ``most`` by name."""
        entries = sorted(self.groups.entries.values(), key=lambda entry: entry.group)[:most]
        clients = {entry.group: self.groups.clients[entry.generation] for entry in entries}
        states = await asyncio.gather(*(client.pool_state() for client in clients.values()))
        return dict(zip(clients, states, strict=True))

    async def profile(self, num_steps: int, group: str | None, patience_s: float) -> Mapping[str, Mapping[str, Any]]:
        """Group → what its leader says. Raises InvalidRequest for a group that there is not."""
        await self.groups.try_refresh()
        clients = {entry.group: self.groups.clients[generation] for generation, entry in self.groups.entries.items()}
        if group is not None and group not in clients:
            known = ", ".join(sorted(clients)) or "none at present"
            raise InvalidRequest(f"There is no worker group {group[:64]!r}; there are: {known}.", param="group")
        chosen = [group] if group is not None else list(clients)
        answers = await asyncio.gather(*(clients[name].profile(num_steps, patience_s) for name in chosen))
        return dict(zip(chosen, answers, strict=True))

    def _hashes(self, request: GenerationRequest) -> bytes:
        """Empty for a request that is to find no block and leave none: the router then expects neither."""
        if not request.use_prefix_cache:
            return b""
        return pack_hashes(self.hasher.hash_blocks(request.prompt_token_ids, request.cache_salt))

    # ---- Placer ----

    async def submit(self, request: Request, wishes: RouteWishes, past: Past, patience_s: float) -> Placement:
        return await self._submitter.submit(request, wishes, past, patience_s)

    def is_draining(self, generation: int) -> bool:
        entry = self.groups.entries.get(generation)
        return entry is not None and entry.draining

    def acquit(self, request_id: str) -> None:
        self._submitter.trials.end(request_id)

    def ended(self, generation: ClusterGeneration) -> None:
        """A request that a group took is over: it is recorded."""
        self.acquit(generation.request.request_id)
        if (recorder := self._recorders.get(generation.request.model)) is not None:
            recorder.add(
                generation.request, generation.arrival_s, generation.num_branches, generation.num_output_tokens
            )
