"""The gateway's side of the cluster, against real leaders' engines and a real router, without Ray between them."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from itertools import islice
from typing import Any

import pytest
from ray.exceptions import RayActorError
from scripted_cluster import deltas_of, taken

from octavo.cluster.api.model_metrics import ModelsMetrics
from octavo.cluster.api.service import GenerationRequest
from octavo.cluster.data_plane import ClusterService
from octavo.cluster.router_client import RouterClient
from octavo.cluster.token_stream import GroupLost, TokenStream
from octavo.router.actor import RouterCore
from octavo.worker.engine import Engine
from octavo.worker.engine_loop import EngineLoop
from octavo.worker.errors import Overloaded, Unavailable
from octavo.worker.line_frames import LineAddress
from octavo.worker.messages import FinishReason, SamplingParams, SequenceUpdate, TokenLogprobs
from octavo.worker.prompt_reading import scored_tokens
from octavo.worker.report_book import GroupIdentity, ReportBook
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.sampling_row import SamplingRow, StepResult
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.step_plan import StepPlan
from octavo.worker.step_thread import StepThread
from octavo.worker.token_line import TokenLineServer
from octavo.worker.wire import pack

HASHER = RoutingHasher(b"a key of the tests", 16)
LIMITS = SchedulerLimits(num_blocks=64, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512)


POISON = 6666
"""A step that computes this token fails."""


class CountingExecutor:
    """The token at output position p is p + 1: what any group would go on with. ``pause_s`` makes streams last.

    Log-probabilities are told apart by their ranks, the tokens."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self._thread = StepThread("model")

    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        return self._thread.submit(functools.partial(self._run, plan, rows))

    def _run(self, plan: StepPlan, rows: list[SamplingRow]) -> StepResult:
        time.sleep(self.pause_s)
        if POISON in plan.token_ids:
            raise RuntimeError("device-side assert")
        logprobs = {i: ranked(row.position + 1) for i, row in enumerate(rows) if row.num_logprobs is not None}
        targets = iter(scored_tokens(plan)[1].tolist() if len(plan.scored) else ())
        scores = [tuple(map(ranked, islice(targets, count))) for count in plan.scored[:, 1].tolist()]
        return StepResult([row.position + 1 for row in rows], logprobs=logprobs, prompt_logprobs=tuple(scores))

    def heartbeat(self) -> None: ...

    def shut_down(self) -> None: ...


def ranked(token: int) -> TokenLogprobs:
    return TokenLogprobs(-1.0, rank=token)


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
    """What ``worker/leader.py`` is, with an engine that counts."""

    def __init__(
        self, name: str, generation: int, pause_s: float, max_queued_requests: int | None, told_num_seqs: int
    ) -> None:
        executor = CountingExecutor(pause_s)
        identity = GroupIdentity("m", name, generation, 16, LIMITS.num_blocks, told_num_seqs)
        self.dead = False
        self.loop = EngineLoop(
            lambda emit: Engine(Scheduler(LIMITS, HASHER), executor, clock=time.monotonic, emit=emit),
            executor,
            ReportBook(identity, lambda engine: "", ("router",)),
            generation,
            max_queued_requests=max_queued_requests,
        )
        self._server = TokenLineServer(self.loop)
        self._address: LineAddress | None = None
        self.line_address = Remote(self._listen, lambda: self.dead)
        self.reset_prefix_cache = Remote(self._reset, lambda: self.dead)

    @property
    def has_lines(self) -> bool:
        return bool(self._server._lines)

    @property
    def has_failed(self) -> bool:
        return self.loop._failure is not None

    def die(self) -> None:
        self.dead = True
        self._server.close()

    async def _listen(self) -> LineAddress:
        self._address = self._address or await self._server.open("127.0.0.1")
        return self._address

    async def _reset(self) -> Any:
        return await self.loop.ask(lambda engine: engine.reset_prefix_cache())

    async def report_to(self, core: RouterCore) -> None:
        report = self.loop.take_report("router")
        wants = await core.report(pack(report), self)
        self.loop.report_arrived("router", report, wants_snapshot=wants)


class Cluster:
    """A router and two leaders, and the service of one gateway. The router is told of ``told_num_seqs`` places each."""

    def __init__(
        self,
        pause_s: float = 0.002,
        max_queued_requests: int | None = None,
        told_num_seqs: int = LIMITS.max_num_seqs,
    ) -> None:
        self.core = RouterCore()
        self.router_dead = False
        self.leaders = {
            name: Leader(name, number, pause_s, max_queued_requests, told_num_seqs)
            for number, name in enumerate(("a", "b"), start=1)
        }
        for name in ("route", "registry", "report_gateway", "cluster_metrics"):
            setattr(self, name, Remote(functools.partial(self._ask_router, name), lambda: self.router_dead))
        self.metrics = ModelsMetrics(["m"], "g")
        self.service = ClusterService("g", RouterClient("g", [lambda: self]), HASHER, self.metrics)

    async def _ask_router(self, name: str, *args: Any) -> Any:
        return await getattr(self.core, name)(*args)

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
    async for delta in deltas_of(generation):
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
            cluster.leaders[first].die()

    assert await collect(generation, kill_soon) == list(range(1, 41))
    assert generation.route.group != first
    assert "octavo_gateway_failovers_total" in cluster.metrics.text()
    assert cluster.metrics["m"].failovers._value.get() == 1


async def test_a_stream_that_moves_finds_the_line_to_the_other_group_open(cluster: Cluster) -> None:
    """Nobody asks a leader for its address then, which may take long while parts of the cluster die."""
    await cluster.service.groups.refresh()
    for leader in cluster.leaders.values():
        while not leader.has_lines:
            await asyncio.sleep(0.001)
        leader.line_address = Remote(never, lambda: False)
    generation = await cluster.service.start(request())
    first = cluster.leaders[generation.route.group]
    assert await collect(generation, lambda tokens: first.die() if len(tokens) >= 5 else None) == list(range(1, 41))


async def never() -> None:
    await asyncio.Event().wait()


async def test_new_requests_avoid_a_dead_group_at_once_although_the_router_still_lists_it(cluster: Cluster) -> None:
    await cluster.service.groups.refresh()
    cluster.leaders["a"].die()
    started = time.monotonic()
    for number in range(4):
        generation = await cluster.service.start(request(f"r{number}", max_tokens=4))
        assert generation.route.group == "b"
        assert await collect(generation) == [1, 2, 3, 4]
    assert time.monotonic() - started < 3.0


async def test_without_the_router_requests_are_placed_by_outstanding_tokens(cluster: Cluster) -> None:
    await cluster.service.groups.refresh()
    cluster.router_dead = True
    generations = [await cluster.service.start(request(f"r{number}")) for number in range(4)]
    groups = [generation.route.group for generation in generations]
    assert sorted(groups) == ["a", "a", "b", "b"]
    assert {generation.route.reason for generation in generations} == {"router_away"}
    for generation in generations:
        assert await collect(generation) == list(range(1, 41))
    assert cluster.metrics["m"].fallback_routes._value.get() == 4


async def test_an_aborted_request_frees_its_blocks(cluster: Cluster) -> None:
    generation = await cluster.service.start(request(max_tokens=400))
    async for _ in deltas_of(generation):
        break
    generation.abort()
    generation.abort()
    leader = cluster.leaders[generation.route.group]
    assert await leader.loop.drained(5.0)
    assert await leader.loop.ask(lambda engine: engine.scheduler.pool.num_free_blocks) == LIMITS.num_blocks


async def test_a_request_that_nobody_can_take_is_refused_within_its_own_time(cluster: Cluster) -> None:
    await cluster.service.groups.refresh()
    for leader in cluster.leaders.values():
        leader.die()
    with pytest.raises(Unavailable):
        await cluster.service.start(request(timeout_s=0.5))


# ---- a request that steps fail on ----


def poisoned() -> GenerationRequest:
    return GenerationRequest("p", "m", (100, POISON, 102), SamplingParams(40, seed=0, temperature=0.0))


async def end_of(generation: Any) -> Any:
    return [delta async for delta in deltas_of(generation) if delta.finish_reason is not None][-1]


@pytest.fixture
async def wide() -> AsyncIterator[Cluster]:
    """One group more than a request may die of."""
    cluster = Cluster()
    cluster.leaders |= {name: Leader(name, 3 + number, 0.002, None, 8) for number, name in enumerate("cd")}
    await cluster.report()
    yield cluster
    cluster.close()


async def test_a_request_that_three_groups_die_of_is_refused_and_the_fourth_lives(wide: Cluster) -> None:
    end = await end_of(await wide.service.start(poisoned()))
    assert end.finish_reason is FinishReason.ERROR
    assert "3 worker groups were lost" in end.error
    assert len(wide.leaders) == 4
    assert await collect(await wide.service.start(request(max_tokens=4))) == [1, 2, 3, 4]
    for leader in wide.leaders.values():
        leader.die()
    with pytest.raises(Unavailable):  # the fourth was the one that answered
        await wide.service.start(request("r2", timeout_s=0.2))


async def test_what_ran_beside_it_goes_on_elsewhere(wide: Cluster) -> None:
    """The groups die one after the other; a stream that was on one of them has lost nothing."""
    beside = await wide.service.start(request())
    output = asyncio.create_task(collect(beside))
    assert (await end_of(await wide.service.start(poisoned()))).finish_reason is FinishReason.ERROR
    assert await output == list(range(1, 41))


async def test_what_was_beside_it_in_three_groups_is_tried_apart_from_it_and_lives(wide: Cluster) -> None:
    """The router knows of one group at any time, so that all of them lose the same ones."""
    wide.core = RouterCore()
    serving = asyncio.create_task(serve_one_after_the_other(wide))
    beside = [asyncio.create_task(collect(await wide.service.start(request(f"r{n}", 400)))) for n in range(4)]
    assert (await end_of(await wide.service.start(poisoned()))).finish_reason is FinishReason.ERROR
    assert await asyncio.gather(*beside) == [list(range(1, 401))] * 4
    assert [leader.has_failed for leader in wide.leaders.values()] == [True, True, True, False]
    serving.cancel()


async def serve_one_after_the_other(cluster: Cluster) -> None:
    """Each until it fails."""
    for leader in cluster.leaders.values():
        while not leader.has_failed:
            await leader.report_to(cluster.core)
            await asyncio.sleep(0.005)


# ---- several branches ----


async def collect_branches(generation: Any, on_token: Callable[[dict[int, list[int]]], None]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = defaultdict(list)
    async for delta in deltas_of(generation):
        tokens[delta.branch].extend(delta.token_ids)
        on_token(tokens)
    return tokens


async def free_blocks(leader: Leader) -> Any:
    return await leader.loop.ask(lambda engine: engine.scheduler.pool.num_free_blocks)


async def test_every_branch_is_generated_to_its_end(cluster: Cluster) -> None:
    generation = await cluster.service.start(request(num_branches=3))
    tokens = await collect_branches(generation, lambda tokens: None)
    assert tokens == {branch: list(range(1, 41)) for branch in range(3)}


async def test_case_bug_091_all_branches_go_on_at_the_other_group(cluster: Cluster) -> None:
    generation = await cluster.service.start(request(num_branches=3))
    first = generation.route.group

    def kill_soon(tokens: dict[int, list[int]]) -> None:
        if len(tokens[2]) == 5:
            generation.end(1)
            cluster.leaders[first].die()

    tokens = await collect_branches(generation, kill_soon)
    assert tokens[0] == tokens[2] == list(range(1, 41))
    assert len(tokens[1]) < 40
    assert generation.route.group != first


async def test_case_bug_078_branches_that_are_ended_leave_nothing(cluster: Cluster) -> None:
    """One is ended alone, then the request is aborted: its blocks are free, and nobody keeps a record of it."""
    for number in range(5):
        generation = await cluster.service.start(request(f"r{number}", max_tokens=400, num_branches=4))
        seen = 0
        async for delta in deltas_of(generation):
            seen += 1
            if seen == 6:
                generation.end(delta.branch)
            if seen == 20:
                break
        generation.abort()
    for leader in cluster.leaders.values():
        assert await leader.loop.drained(5.0)
        assert await free_blocks(leader) == LIMITS.num_blocks
    assert all(client.is_idle for client in cluster.service.groups.clients.values())


async def test_full_queues_refuse_at_once_with_what_the_flag_says() -> None:
    """Each group runs one request of 8 branches and lets one more wait; the router, which would queue what finds no
    place, takes them for larger than they are."""
    cluster = Cluster(pause_s=0.01, max_queued_requests=1, told_num_seqs=1_000)
    await cluster.report()
    generations: list[Any] = []

    async def fill() -> None:
        for number in range(20):
            wide = request(f"r{number}", max_tokens=400, num_branches=8)
            generations.append(await cluster.service.start(wide))

    try:
        with pytest.raises(Overloaded, match="--max-queued-requests is 1") as caught:
            await fill()
        assert caught.value.retry_after_s >= 1.0
        assert {generation.route.group for generation in generations} == {"a", "b"}
    finally:
        for generation in generations:
            generation.abort()
        cluster.close()


async def test_caches_forget_what_no_request_uses(cluster: Cluster) -> None:
    generation = await cluster.service.start(request())
    await collect(generation)
    await cluster.leaders[generation.route.group].loop.drained(5.0)
    forgotten = await cluster.service.reset_prefix_cache()
    assert forgotten[generation.route.group] not in (None, 0)
    assert set(forgotten) == {"a", "b"}
    assert set((await cluster.service.reset_prefix_cache()).values()) == {0}


# ---- log-probabilities ----


async def test_log_probabilities_are_told_once_each_over_two_groups(cluster: Cluster) -> None:
    """The prompt takes three steps; its group dies after the first of them."""
    sampling = SamplingParams(40, seed=0, num_logprobs=0, num_prompt_logprobs=0)
    prompt = tuple(range(100, 250))
    generation = await cluster.service.start(GenerationRequest("r", "m", prompt, sampling))
    first = generation.route.group
    tokens: list[int] = []
    of_output: list[int] = []
    of_prompt: list[int] = []
    async for delta in deltas_of(generation):
        cluster.leaders[first].die()
        assert delta.token_ids or delta.prompt_logprobs
        tokens += delta.token_ids
        of_output += [each.rank for each in delta.logprobs]
        of_prompt += [each.rank for each in delta.prompt_logprobs]
    assert tokens == of_output == list(range(1, 41))
    assert of_prompt == list(prompt[1:])
    assert generation.route.group != first


# ---- updates ----


def update(position: int, *tokens: int) -> SequenceUpdate:
    return SequenceUpdate("r", 0, position, tokens, logprobs=tuple(map(ranked, tokens)))


def of_prompt(position: int, *tokens: int) -> SequenceUpdate:
    return SequenceUpdate("r", 0, 0, (), prompt_position=position, prompt_logprobs=tuple(map(ranked, tokens)))


async def test_a_repeated_update_brings_only_what_is_new() -> None:
    stream = TokenStream({0: 2})
    assert stream.put(update(0, 1, 2))
    assert stream.put(update(1, 2, 3, 4))
    (given,) = await taken(stream)
    assert (given.token_ids, given.logprobs) == ((3, 4), (ranked(3), ranked(4)))


async def test_a_repeated_update_brings_only_what_is_new_of_the_prompt() -> None:
    stream = TokenStream({0: 0})
    assert stream.put(of_prompt(1, 11, 12))
    (given,) = await taken(stream)
    assert [each.rank for each in given.prompt_logprobs] == [11, 12]
    for repeated in (of_prompt(1, 11, 12), of_prompt(2, 12, 13), update(0, 1)):
        assert stream.put(repeated)
    (given,) = await taken(stream)
    assert [each.rank for each in given.prompt_logprobs] == [13]
    assert given.token_ids == (1,)


async def test_a_gap_is_noticed() -> None:
    stream = TokenStream({0: 0})
    assert stream.put(update(0, 1))
    assert not stream.put(update(2, 3))
    assert not stream.put(of_prompt(2, 11))
    stream.lose(GroupLost(is_dead=False))
    (given,) = await taken(stream)
    assert given.token_ids == (1,)
    with pytest.raises(GroupLost):
        await taken(stream)
