"""A cluster's data plane over leaders and a router that do as they are told."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ray.exceptions import RayActorError

from octavo.cluster.api.model_metrics import ModelsMetrics
from octavo.cluster.api.service import GenerationRequest, TokenDelta
from octavo.cluster.data_plane import ClusterService
from octavo.cluster.generation import ClusterGeneration
from octavo.cluster.router_lines import RouterAway
from octavo.cluster.token_stream import TokenStream
from octavo.cluster.trace_recorder import TraceRecorder
from octavo.worker.admission import Refusal
from octavo.worker.line_frames import LineAddress
from octavo.worker.messages import (
    FinishReason,
    GroupEntry,
    Request,
    RouteDecision,
    RouteQuery,
    SamplingParams,
    SequenceUpdate,
    TokenFrame,
)
from octavo.worker.pool_state import PoolState
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.token_line import TokenLineServer

HASHER = RoutingHasher(b"a key of the tests", 16)
PROMPT = tuple(range(100, 150))


class Remote:
    """A method as an actor's handle has it."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self._method = method

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._method(*args))


class ScriptedLeader:
    """Keeps what it is asked and gives what the test says, by a real line; ``refusal`` is the answer to each submit."""

    def __init__(self) -> None:
        self.refusal: Refusal | None = None
        self.requests: list[Request] = []
        self.aborts: list[tuple[str, int | None]] = []
        self.num_forgotten: int | None = 5
        self.submitted = asyncio.Event()
        self._updates: dict[str, list[SequenceUpdate]] = defaultdict(list)
        self._news = asyncio.Condition()
        self._is_dead = False
        self._server = TokenLineServer(self)
        self._address: LineAddress | None = None
        self.line_address = Remote(self._listen)
        self.reset_prefix_cache = Remote(self._reset)
        self.pool: PoolState | None = None
        """None: the leader does not say."""
        self.pool_state = Remote(self._say_pool)

    async def give(
        self, branch: int, position: int, tokens: tuple[int, ...], reason: FinishReason | None = None, **fields: Any
    ) -> None:
        """An update of the request that came last."""
        await self.give_all(SequenceUpdate(self.requests[-1].request_id, branch, position, tokens, reason, **fields))

    async def give_all(self, *updates: SequenceUpdate) -> None:
        async with self._news:
            self._updates[self.requests[-1].gateway_id] += updates
            self._news.notify_all()

    async def die(self) -> None:
        async with self._news:
            self._is_dead = True
            self._news.notify_all()
        self._server.close()

    async def _listen(self) -> LineAddress:
        self._address = self._address or await self._server.open("127.0.0.1")
        if self._is_dead:
            self._server.close()
            raise RayActorError
        return self._address

    # ---- asked by the gateway's line ----

    def submit(self, request: Request) -> Refusal | None:
        if self.refusal is None:
            self.requests.append(request)
            self.submitted.set()
        return self.refusal

    def abort(self, request_ids: tuple[str, ...], branch: int | None) -> None:
        self.aborts += [(request_id, branch) for request_id in request_ids]

    async def poll(self, mailbox: str, acknowledged: int, wait_s: float) -> TokenFrame:
        async with self._news:
            updates = self._updates[mailbox]
            await self._news.wait_for(lambda: self._is_dead or len(updates) > acknowledged or wait_s == 0.0)
            if self._is_dead:
                raise RuntimeError("the engine is over")
            return TokenFrame(1, len(updates), tuple(updates[acknowledged:]))

    # ---- asked by Ray ----

    async def _reset(self) -> int:
        if self.num_forgotten is None:
            raise RayActorError
        return self.num_forgotten

    async def _say_pool(self) -> PoolState:
        if self.pool is None:
            raise RayActorError
        return self.pool


class ScriptedRouter:
    """Gives the first group, by name, that is not excluded; ``refusal`` instead, while there is one."""

    def __init__(self, leaders: dict[str, ScriptedLeader]) -> None:
        self.leaders = leaders
        self.queries: list[RouteQuery] = []
        self.is_away = False
        self.refusal: RouteDecision | None = None
        self.wait_s = 0.0
        """For so long every query is queued."""
        self.weights: dict[str, str] = {}
        """By group."""
        self.draining: set[str] = set()

    async def registry(self) -> list[tuple[GroupEntry, ScriptedLeader]]:
        entries = enumerate(self.leaders.items(), start=1)
        return [
            (GroupEntry("m", name, number, number, name in self.draining, self.weights.get(name, "")), leader)
            for number, (name, leader) in entries
        ]

    async def route(self, query: RouteQuery) -> RouteDecision:
        if self.is_away:
            raise RouterAway
        self.queries.append(query)
        await asyncio.sleep(self.wait_s)
        if self.refusal is not None:
            return self.refusal
        for number, name in enumerate(self.leaders, start=1):
            if number not in query.excluded_generations:
                return RouteDecision(query.request_id, name, number, 0, "cold", queued=self.wait_s > 0.0)
        return RouteDecision(query.request_id, None, 0, 0, "no_group", 1.0)

    def cancel(self, request_id: str) -> None: ...


class Cluster:
    """The service of one gateway, over two such leaders and such a router."""

    def __init__(self, recorder: TraceRecorder | None = None) -> None:
        self.a, self.b = ScriptedLeader(), ScriptedLeader()
        self.router = ScriptedRouter({"a": self.a, "b": self.b})
        self.metrics = ModelsMetrics(["m"], "g")
        router: Any = self.router
        self.service = ClusterService("g", router, HASHER, self.metrics, {} if recorder is None else {"m": recorder})


def request(num_branches: int = 1, beam_width: int | None = None, **fields: Any) -> GenerationRequest:
    sampling = SamplingParams(20, seed=7, beam_width=beam_width)
    return GenerationRequest("r", "m", PROMPT, sampling, num_branches=num_branches, **fields)


async def deltas_of(generation: ClusterGeneration) -> AsyncIterator[TokenDelta]:
    """Deltas as they come, until the generation is over."""
    news = asyncio.Event()
    generation.listen(news.set)
    while not generation.is_over:
        await news.wait()
        news.clear()
        for delta in generation.take():
            yield delta


async def taken(stream: TokenStream) -> Sequence[SequenceUpdate]:
    """What has come, when something has. Raises GroupLost after the last of it when the group is lost."""
    news = asyncio.Event()
    stream.listen(news.set)
    async with asyncio.timeout(10):
        await news.wait()
    updates = stream.take()
    if not updates and stream.loss is not None:
        raise stream.loss
    return updates


async def take(deltas: AsyncIterator[TokenDelta], count: int) -> list[TokenDelta]:
    async with asyncio.timeout(10):
        return [await anext(deltas) for _ in range(count)]


async def rest(deltas: AsyncIterator[TokenDelta]) -> list[TokenDelta]:
    async with asyncio.timeout(10):
        return [delta async for delta in deltas]
