"""What becomes of queued requests between a gateway's line and real routers, also when answers are lost on the way."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_actor import LONG_S, RouterActor, until

from octavo.cluster import router_client, router_lines
from octavo.cluster.router_client import RouterClient
from octavo.cluster.router_lines import RouterAway
from octavo.router.actor import GATEWAY_SILENCE_S, RouterCore
from octavo.router.config import RouterConfig
from octavo.router.tenants import TenantLimits
from octavo.worker.messages import GroupReport, RequestProgress, RouteDecision, RouteQuery
from octavo.worker.wire import pack

TENANT = "t"
SHORT_S = 0.02


class Bench:
    """One gateway; routers that let one request of the tenant run at a time, or ``limit``; a group that tells them of
    ends alone."""

    def __init__(self, num_routers: int = 1, limit: int = 1) -> None:
        self.now = 0.0
        config = RouterConfig(tenants={TENANT: TenantLimits(max_running_requests=limit)}, shares=num_routers > 1)
        self.actors: list[RouterActor] = []
        for number in range(num_routers):
            peers = [lambda peer=peer: self.actors[peer] for peer in range(num_routers) if peer != number]
            self.actors.append(RouterActor(RouterCore(config, clock=lambda: self.now, find_peers=peers)))
        self.actor = self.actors[0]
        self.client = RouterClient("g", [lambda actor=actor: actor for actor in self.actors])

    async def report(self, *finished: str) -> None:
        progress = tuple(RequestProgress(name, prefilled=True, finished=True) for name in finished)
        for actor in self.actors:
            await actor.core.report(pack(_report(progress)), None)

    def ask(self, request_id: str) -> asyncio.Task[RouteDecision]:
        return asyncio.create_task(self.client.route(RouteQuery(request_id, "m", b"", 10, 10, tenant=TENANT)))

    async def queue(self, request_id: str, actor: RouterActor | None = None) -> asyncio.Task[RouteDecision]:
        task = self.ask(request_id)
        await until(lambda: self.waiting(actor or self.actor) > 0 and bool(self.client._pollers))
        return task

    def running(self, actor: RouterActor) -> int:
        return actor.core._router.admission.of_tenant(TENANT)[0]

    def waiting(self, actor: RouterActor) -> int:
        return actor.core._router.admission.of_tenant(TENANT)[1]

    async def have_turn(self, *request_ids: str) -> None:
        """All but the first of them waited for the one before."""
        await self.ask(request_ids[0])
        for before, request_id in itertools.pairwise(request_ids):
            task = await self.queue(request_id)
            await self.report(before)
            assert (await task).queued

    def check(self) -> None:
        for actor in self.actors:
            actor.core._router.check()


def _report(progress: tuple[RequestProgress, ...] = ()) -> GroupReport:
    return GroupReport(
        model="m",
        group="a",
        generation=1,
        block_size=16,
        num_blocks=100_000,
        num_free_blocks=100_000,
        max_num_seqs=1_000,
        num_running=0,
        num_waiting=0,
        num_uncomputed_prompt_tokens=0,
        prefill_tokens_per_s=5_000.0,
        decode_step_s=0.02,
        draining=False,
        progress=progress,
    )


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.report()
    yield bench
    bench.check()
    await _end_tasks()


async def _end_tasks() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll's answer that is lost is missed at once, and its router is asked again as soon."""
    monkeypatch.setattr(router_client, "CALL_TIMEOUT_S", SHORT_S)
    monkeypatch.setattr(router_client, "TURNS_TIMEOUT_S", SHORT_S)
    monkeypatch.setattr(router_lines, "AWAY_S", 0.0)


async def test_a_turn_is_acknowledged_when_nothing_else_is_queued(bench: Bench) -> None:
    await bench.have_turn("a", "b")
    await until(lambda: not bench.client._pollers)
    assert bench.actor.core._mail.is_empty
    turner = bench.actor.core._turner
    await until(lambda: turner is not None and turner.done())


async def test_what_runs_is_not_disturbed_by_the_next_wait(bench: Bench) -> None:
    await bench.have_turn("a", "b")
    await until(lambda: not bench.client._pollers)
    await bench.queue("c")
    await bench.client._undo()
    assert (bench.running(bench.actor), bench.waiting(bench.actor)) == (1, 1)


async def test_what_runs_is_not_disturbed_when_the_acknowledgement_is_lost(bench: Bench, hurried: None) -> None:
    turns = bench.actor.core.turns

    async def turns_or_nothing(gateway_id: str, acknowledged: int, timeout_s: float) -> bytes:
        return await (turns(gateway_id, acknowledged, timeout_s) if timeout_s > 0.0 else asyncio.sleep(LONG_S, b""))

    bench.actor.core.turns = turns_or_nothing  # type: ignore[method-assign]
    await bench.have_turn("a", "b")
    await until(lambda: not bench.client._pollers)
    assert not bench.actor.core._mail.is_empty
    await bench.queue("c")
    await until(lambda: bench.actor.core._mail.is_empty)  # the next poller has got it again, and acknowledged it
    await bench.client._undo()
    assert (bench.running(bench.actor), bench.waiting(bench.actor)) == (1, 1)


async def test_what_runs_is_not_given_up_with_a_gateway_that_is_silent(bench: Bench) -> None:
    bench.actor.loses = lambda method, args: method == "turns" and args[2] == 0.0
    await bench.have_turn("a", "b")
    await bench.report()
    bench.now = GATEWAY_SILENCE_S + 1.0
    turner = bench.actor.core._turner
    await until(lambda: turner is not None and turner.done())
    assert bench.running(bench.actor) == 1


async def test_a_turn_whose_answer_is_lost_is_given_again(bench: Bench, hurried: None) -> None:
    num_lost = 0

    def loses(method: str, args: tuple[Any, ...]) -> bool:
        nonlocal num_lost
        has_turn = method == "turns" and not bench.waiting(bench.actor)
        num_lost += has_turn and num_lost < 1
        return has_turn and num_lost == 1

    await bench.ask("a")
    task = await bench.queue("b")
    bench.actor.loses = loses
    await bench.report("a")
    assert (await task).group == "a"
    await bench.client._undo()
    assert bench.running(bench.actor) == 1


async def test_no_place_is_lost_or_given_twice_whatever_answers_are_lost(
    hurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two routers that lose one answer in ten; some requests are given up. What is placed stays so until it ends."""
    monkeypatch.setattr(router_lines, "CALL_TIMEOUT_S", SHORT_S)
    monkeypatch.setattr(router_lines, "HURRY_S", SHORT_S)
    rng = random.Random(0)
    bench = Bench(num_routers=2, limit=3)
    for actor in bench.actors:
        actor.loses = lambda method, args: method in ("route", "turns") and rng.random() < 0.1
    await bench.report()

    def has(request_id: str) -> bool:
        return any(request_id in actor.core._router.admission._running for actor in bench.actors)

    async def live(number: int) -> bool:
        request_id = f"r{number}"
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        task = bench.ask(request_id)
        patience_s = SHORT_S if number % 5 == 0 else None
        try:
            placed = (await asyncio.wait_for(task, patience_s)).group == "a"
        except (RouterAway, TimeoutError):
            placed = False
        if not placed:
            bench.client.cancel(request_id)
            return False
        for _ in range(5):
            await asyncio.sleep(SHORT_S / 2)
            assert has(request_id)
        await bench.report(request_id)
        return True

    async def refresh_registry() -> None:
        while True:
            with contextlib.suppress(RouterAway):
                await bench.client.registry()
            await asyncio.sleep(SHORT_S)

    refreshing = asyncio.create_task(refresh_registry())
    num_placed = sum(await asyncio.gather(*[live(number) for number in range(60)]))
    assert num_placed > 0
    for actor in bench.actors:
        actor.loses = lambda method, args: False
    await until(lambda: not any(bench.running(actor) or actor.core._is_waited_for for actor in bench.actors))
    refreshing.cancel()
    bench.check()
    await _end_tasks()
