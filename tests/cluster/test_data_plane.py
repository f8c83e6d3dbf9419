"""The gateway's side of the cluster, against real leaders' engines and a real router, without Ray between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from ray.exceptions import RayActorError

from octavo.cluster.api.metrics import GatewayMetrics
from octavo.cluster.api.service import GenerationRequest
from octavo.cluster.data_plane import ClusterService
from octavo.cluster.group_client import GroupLost, TokenStream
from octavo.cluster.router_client import RouterClient
from octavo.router.actor import RouterCore
from octavo.worker.engine import Engine
from octavo.worker.engine_loop import EngineLoop
from octavo.worker.errors import Unavailable
from octavo.worker.messages import FinishReason, Request, SamplingParams, SequenceUpdate
from octavo.worker.report_book import GroupIdentity, ReportBook
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.sampling_row import SamplingRow
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.step_plan import StepPlan
from octavo.worker.wire import pack, unpack

HASHER = RoutingHasher(b"a key of the tests", 16)
LIMITS = SchedulerLimits(num_blocks=64, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512)


class CountingExecutor:
    """The token at output position p is p + 1: what any group would go on with. ``pause_s`` makes streams last."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def execute(self, plan: StepPlan, rows: list[SamplingRow]) -> list[int]:
        time.sleep(self.pause_s)
        return [row.position + 1 for row in rows]

    def heartbeat(self) -> None: ...

    def shut_down(self) -> None: ...


class Remote:
    """A method as an actor's handle has it; ``is_dead`` decides whether it still answers."""

    def __init__(self, method: Callable[..., Awaitable[Any]], is_dead: Callable[[], bool]) -> None:
        self._method = method
        self._is_dead = is_dead

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        async def call() -> Any:
            if self._is_dead():
                raise RayActorError
            answer = await self._method(*args)
            if self._is_dead():
                raise RayActorError
            return answer

        return asyncio.ensure_future(call())


class Leader:
    """What ``worker/actor.py`` is, with an engine that counts."""

    def __init__(self, name: str, generation: int, pause_s: float) -> None:
        executor = CountingExecutor(pause_s)
        identity = GroupIdentity("m", name, generation, 16, LIMITS.num_blocks, LIMITS.max_num_seqs)
        self.dead = False
        self.loop = EngineLoop(
            lambda emit: Engine(Scheduler(LIMITS, HASHER), executor, clock=time.monotonic, emit=emit),
            executor,
            ReportBook(identity, lambda engine: ""),
            generation,
        )
        self.submit = Remote(self._submit, lambda: self.dead)
        self.abort = Remote(self._abort, lambda: self.dead)
        self.poll = Remote(self._poll, lambda: self.dead)

    async def _submit(self, packed: bytes) -> None:
        self.loop.submit(unpack(packed, Request))

    async def _abort(self, request_ids: tuple[str, ...]) -> None:
        self.loop.abort(request_ids)

    async def _poll(self, gateway_id: str, acknowledged: int, timeout_s: float) -> bytes:
        return pack(await self.loop.poll(gateway_id, acknowledged, timeout_s))

    async def report_to(self, core: RouterCore) -> None:
        report = self.loop.take_report(metrics_due=False)
        wants = await core.report(pack(report), self)
        self.loop.report_arrived(report, wants_snapshot=wants)


class Cluster:
    """A router and two leaders, and the service of one gateway."""

    def __init__(self, pause_s: float = 0.002) -> None:
        self.core = RouterCore()
        self.router_dead = False
        self.leaders = {name: Leader(name, number, pause_s) for number, name in enumerate(("a", "b"), start=1)}
        for name in ("route", "registry", "report_gateway", "cluster_metrics"):
            setattr(self, name, Remote(getattr(self.core, name), lambda: self.router_dead))
        self.metrics = GatewayMetrics("m", "g")
        self.service = ClusterService("g", RouterClient("g", lambda: self), HASHER, self.metrics)

    async def report(self) -> None:
        for leader in self.leaders.values():
            if not leader.dead:
                await leader.report_to(self.core)

    def close(self) -> None:
        for leader in self.leaders.values():
            leader.loop.stop(5.0)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    await cluster.report()
    yield cluster
    cluster.close()


def request(request_id: str = "r", max_tokens: int = 40, **fields: Any) -> GenerationRequest:
    sampling = SamplingParams(max_tokens, seed=0, temperature=0.0)
    return GenerationRequest(request_id, "m", tuple(range(100, 150)), sampling, **fields)


async def collect(generation: Any, on_token: Callable[[list[int]], None] = lambda tokens: None) -> list[int]:
    tokens: list[int] = []
    async for delta in generation.tokens():
        tokens.extend(delta.token_ids)
        on_token(tokens)
        if delta.finish_reason is not None:
            assert delta.finish_reason is FinishReason.LENGTH, delta
    return tokens


async def test_tokens_come_in_order_and_the_leader_may_forget_them(cluster: Cluster) -> None:
    generation = await cluster.service.start(request())
    assert await collect(generation) == list(range(1, 41))
    leader = cluster.leaders[generation.route.group]
    assert await leader.loop.drained(5.0)


async def test_a_stream_goes_on_at_the_other_group_when_its_own_dies(cluster: Cluster) -> None:
    generation = await cluster.service.start(request())
    first = generation.route.group

    def kill_soon(tokens: list[int]) -> None:
        if len(tokens) >= 5:
            cluster.leaders[first].dead = True

    assert await collect(generation, kill_soon) == list(range(1, 41))
    assert generation.route.group != first
    assert "octavo_gateway_failovers_total" in cluster.metrics.text()
    assert cluster.metrics.failovers._value.get() == 1


async def test_new_requests_avoid_a_dead_group_at_once_although_the_router_still_lists_it(cluster: Cluster) -> None:
    await cluster.service.refresh()
    cluster.leaders["a"].dead = True
    started = time.monotonic()
    for number in range(4):
        generation = await cluster.service.start(request(f"r{number}", max_tokens=4))
        assert generation.route.group == "b"
        assert await collect(generation) == [1, 2, 3, 4]
    assert time.monotonic() - started < 3.0


async def test_without_the_router_requests_are_placed_by_outstanding_tokens(cluster: Cluster) -> None:
    await cluster.service.refresh()
    cluster.router_dead = True
    generations = [await cluster.service.start(request(f"r{number}")) for number in range(4)]
    groups = [generation.route.group for generation in generations]
    assert sorted(groups) == ["a", "a", "b", "b"]
    assert {generation.route.reason for generation in generations} == {"router_away"}
    for generation in generations:
        assert await collect(generation) == list(range(1, 41))
    assert cluster.metrics.fallback_routes._value.get() == 4


async def test_an_aborted_request_frees_its_blocks(cluster: Cluster) -> None:
    generation = await cluster.service.start(request(max_tokens=400))
    async for _ in generation.tokens():
        break
    generation.abort()
    generation.abort()
    leader = cluster.leaders[generation.route.group]
    assert await leader.loop.drained(5.0)
    assert await leader.loop.ask(lambda engine: engine.scheduler.pool.num_free_blocks) == LIMITS.num_blocks


async def test_a_request_that_nobody_can_take_is_refused_within_its_own_time(cluster: Cluster) -> None:
    await cluster.service.refresh()
    for leader in cluster.leaders.values():
        leader.dead = True
    with pytest.raises(Unavailable):
        await cluster.service.start(request(timeout_s=0.5))


def update(position: int, *tokens: int) -> SequenceUpdate:
    return SequenceUpdate("r", 0, position, tokens)


async def test_a_repeated_update_brings_only_what_is_new() -> None:
    stream = TokenStream({0: 2})
    assert stream.put(update(0, 1, 2))
    assert stream.put(update(1, 2, 3, 4))
    assert (await anext(stream.updates())).token_ids == (3, 4)


async def test_a_gap_is_noticed() -> None:
    stream = TokenStream({0: 0})
    assert stream.put(update(0, 1))
    assert not stream.put(update(2, 3))
    stream.lose(GroupLost(is_dead=False))
    updates = stream.updates()
    assert (await anext(updates)).token_ids == (1,)
    with pytest.raises(GroupLost):
        await anext(updates)
