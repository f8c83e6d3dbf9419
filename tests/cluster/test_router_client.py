"""A gateway's line to several routers: which one it uses, and what becomes of its queries when that one goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_router import FakeRouter
from router_actor import RouterActor, until

from octavo.cluster import router_client, router_lines
from octavo.cluster.router_client import RouterClient
from octavo.cluster.router_lines import RouterAway
from octavo.router.actor import RouterCore
from octavo.worker.messages import RouteDecision, RouteDecisions, RouteQuery
from octavo.worker.wire import pack


class Actor(RouterActor):
    """Around a router that does as it is told."""

    def __init__(self, name: str) -> None:
        self.start_again(name)

    def start_again(self, name: str) -> None:
        self.router = FakeRouter(name)
        super().__init__(RouterCore(router=self.router, name=name))  # type: ignore[arg-type]
        self.set_num_groups(1)

    def set_num_groups(self, number: int) -> None:
        self.router.num_groups = number
        self.core._leaders = dict.fromkeys(range(number))


class Bench:
    """Two routers, and a gateway that uses the first of them."""

    def __init__(self) -> None:
        self.actors = [Actor("0"), Actor("1")]
        self.first, self.second = self.actors
        self.client = RouterClient(gateway_of(0), [lambda: self.first, lambda: self.second])

    def ask(self, request_id: str, **fields: Any) -> asyncio.Task[RouteDecision]:
        return asyncio.create_task(self.client.route(RouteQuery(request_id, "m", b"", 10, 10, **fields)))

    async def queue(self, request_id: str, actor: Actor, **fields: Any) -> asyncio.Task[RouteDecision]:
        """Ask, and wait until it is queued there and its turn is being waited for."""
        actor.router.is_full = True
        task = self.ask(request_id, **fields)
        await until(lambda: request_id in actor.router._queue and bool(self.client._pollers))
        return task


def gateway_of(router: int) -> str:
    """A gateway's id whose own router is that one of two."""
    ids = (f"gateway {number}" for number in range(100))
    return next(name for name in ids if router_lines.zlib.crc32(name.encode()) % 2 == router)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def test_gateways_are_spread_over_the_routers(bench: Bench) -> None:
    await bench.ask("r")
    clients = [RouterClient(gateway_of(router), [lambda: bench.first, lambda: bench.second]) for router in (0, 1)]
    decisions = [await client.route(RouteQuery("r", "m", b"", 1, 1)) for client in clients]
    assert [decision.group for decision in decisions] == ["0", "1"]


async def test_a_query_that_its_router_dies_over_is_asked_at_the_other(bench: Bench) -> None:
    bench.first.hangs = True
    asked = [bench.ask(name) for name in "rst"]
    await until(lambda: len(bench.first.router.asked) == 3)
    bench.first.died.set()
    assert [(await task).group for task in asked] == ["1"] * 3
    calls = bench.first.num_calls
    assert (await bench.ask("u")).group == "1"
    assert bench.first.num_calls == calls  # it is not tried again with every request


async def test_a_router_that_hangs_costs_little_and_is_told_later_what_it_decided_for_nobody(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_lines, "HURRY_S", 0.02)
    monkeypatch.setattr(router_lines, "AWAY_S", 0.0)
    await bench.ask("q")
    bench.client.cancel("q")
    bench.first.hangs = True
    assert (await bench.ask("r")).group == "1"
    assert [query.request_id for query in bench.first.router.asked] == ["q", "r"]
    bench.first.hangs = False
    await bench.client.registry()
    assert bench.first.router.cancelled == ["q", "q", "r"]
    assert bench.second.router.cancelled == []


async def test_only_when_no_router_answers_it_is_said_so_and_then_at_once(bench: Bench) -> None:
    for actor in bench.actors:
        actor.died.set()
    with pytest.raises(RouterAway):
        await bench.ask("r")
    calls = [actor.num_calls for actor in bench.actors]
    with pytest.raises(RouterAway):
        await bench.ask("s")
    assert [actor.num_calls for actor in bench.actors] == calls
    bench.second.start_again("1")
    await bench.client.registry()
    assert (await bench.ask("t")).group == "1"


@pytest.mark.parametrize("answer", [b"nonsense", pack(RouteDecisions(()))])
async def test_a_router_whose_answer_makes_no_sense_is_passed_over(bench: Bench, answer: bytes) -> None:
    async def route(packed: bytes) -> bytes:
        return answer

    bench.first.core.route = route  # type: ignore[method-assign]
    assert (await bench.ask("r")).group == "1"


async def test_whatever_goes_wrong_every_question_has_its_end_and_the_next_one_an_answer(bench: Bench) -> None:
    async def route(packed: bytes) -> bytes:
        raise KeyError("unexpected")

    working, bench.first.core.route = bench.first.core.route, route  # type: ignore[method-assign]
    for task in [bench.ask(name) for name in "rs"]:
        with pytest.raises(RouterAway):
            await task
    bench.first.core.route = working  # type: ignore[method-assign]
    assert (await bench.ask("t")).group == "0"


async def test_what_is_given_up_before_it_was_asked_is_not_asked(bench: Bench) -> None:
    bench.first.hangs = True
    sent = bench.ask("r")
    await until(lambda: len(bench.first.router.asked) == 1)
    unsent = bench.ask("s")
    await asyncio.sleep(0)
    unsent.cancel()
    bench.client.cancel("s")
    bench.first.hangs = False
    await sent
    await bench.ask("t")
    assert [query.request_id for query in bench.first.router.asked] == ["r", "t"]


async def test_what_is_given_up_is_said_to_the_router_that_decided_or_queued_it(bench: Bench) -> None:
    await bench.ask("r")
    waiting = await bench.queue("q", bench.first)
    bench.client._lines.use(bench.client._lines._lines[1])
    await bench.ask("s")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for name in ("r", "q", "s", "never asked"):
        bench.client.cancel(name)
    await until(lambda: bool(bench.first.router.cancelled and bench.second.router.cancelled))
    assert (bench.first.router.cancelled, bench.second.router.cancelled) == (["r", "q"], ["s"])


async def test_what_is_given_up_while_its_router_is_away_is_said_to_it_later(bench: Bench) -> None:
    await bench.ask("r")
    line = bench.client._lines._home
    line.away_until_s = float("inf")
    bench.client.cancel("r")
    await bench.client.registry()
    assert bench.first.router.cancelled == []
    bench.first.died.set()
    line.away_until_s = 0.0
    await bench.client._undo()
    bench.first.died.clear()
    line.away_until_s = 0.0
    await bench.client.registry()
    assert bench.first.router.cancelled == ["r"]
    assert bench.second.router.cancelled == []


async def test_the_registry_comes_from_the_router_that_answers(bench: Bench) -> None:
    bench.first.died.set()
    bench.second.set_num_groups(0)
    assert await bench.client.registry() == []
    assert (await bench.ask("r")).group == "1"


async def test_a_gateway_goes_back_to_its_own_router_when_that_knows_all_groups(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_lines, "RETURN_S", -1.0)
    for actor in bench.actors:
        actor.set_num_groups(3)
    bench.first.died.set()
    await bench.client.registry()
    bench.first.start_again("0")
    bench.first.set_num_groups(2)
    assert len(await bench.client.registry()) == 3
    assert (await bench.ask("r")).group == "1"
    bench.first.set_num_groups(3)
    await bench.client.registry()
    assert (await bench.ask("s")).group == "0"


# ---- queued queries ----


async def test_a_queued_query_waits_for_its_turn_with_one_poll_for_all(bench: Bench) -> None:
    tasks = [await bench.queue(name, bench.first) for name in "rst"]
    assert len(bench.client._pollers) == 1
    bench.first.router.let_go("s")
    decision = await tasks[1]
    assert (decision.group, decision.queued) == ("0", True)
    assert not tasks[0].done()
    for name in "rt":
        bench.first.router.let_go(name)
    assert [(await task).request_id for task in tasks] == ["r", "s", "t"]
    await until(lambda: not bench.client._pollers)


async def test_a_query_that_does_not_wait_is_not_marked_as_queued(bench: Bench) -> None:
    assert not (await bench.ask("r")).queued


async def test_queued_queries_are_asked_at_the_other_router_when_theirs_dies(bench: Bench) -> None:
    tasks = [await bench.queue(name, bench.first, queue_timeout_s=50.0, timeout_s=70.0) for name in "rs"]
    bench.second.router.is_full = True
    bench.first.died.set()
    await until(lambda: bench.second.router.num_queued == 2)
    for query in bench.second.router.asked:
        waits_s, lasts_s = query.queue_timeout_s or 0.0, query.timeout_s or 0.0
        assert 0.0 < waits_s < 50.0
        assert lasts_s - waits_s == pytest.approx(20.0)
    for name in "rs":
        bench.second.router.let_go(name)
    decisions = [await task for task in tasks]
    assert [(decision.group, decision.queued) for decision in decisions] == [("1", True)] * 2


async def test_queued_queries_that_are_moved_are_given_up_where_they_were(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_client, "TURNS_TIMEOUT_S", 0.01)
    monkeypatch.setattr(router_client, "CALL_TIMEOUT_S", 0.04)
    monkeypatch.setattr(router_lines, "AWAY_S", 0.0)
    bench.first.loses = lambda method, args: method == "turns"
    task = await bench.queue("r", bench.first)
    bench.client._lines.use(bench.client._lines._lines[1])
    assert (await task).group == "1"
    await bench.client.registry()
    assert bench.first.router.cancelled == ["r"]
    assert bench.first.router.num_queued == 0
    await until(lambda: not bench.first.core._is_waited_for)


async def test_queued_queries_are_not_left_waiting_when_no_router_is_left(bench: Bench) -> None:
    bench.second.died.set()
    task = await bench.queue("r", bench.first)
    bench.first.died.set()
    with pytest.raises(RouterAway):
        await task


async def test_queries_that_their_router_has_forgotten_are_asked_again(bench: Bench) -> None:
    task = await bench.queue("r", bench.first)
    await until(lambda: bench.first.num_calls == 3)  # route, and two polls: the first one is answered at once
    bench.first.core._mail.drop_silent(float("inf"), 0.0)
    bench.first.router.is_full = False
    assert (await task).group == "0"
    assert len(bench.first.router.asked) == 2


async def test_a_queued_query_that_is_given_up_is_cancelled_at_once(bench: Bench) -> None:
    task = await bench.queue("r", bench.first)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    bench.client.cancel("r")
    await until(lambda: bench.first.router.cancelled == ["r"])
    assert bench.first.router.num_queued == 0


# ---- what is asked of all ----


async def test_metrics_and_decisions_are_those_of_all_routers(bench: Bench) -> None:
    await bench.ask("r")
    await bench.client.report_metrics("octavo_gateway_x 1\n")
    texts = await bench.client.cluster_metrics()
    assert set(texts) == {"router:0", "router:1", f"gateway:{gateway_of(0)}"}
    for actor in bench.actors:
        assert f"gateway:{gateway_of(0)}" in await actor.core.cluster_metrics()
    assert 'router="1"' in texts["router:1"]
    (decision,) = await bench.client.explain(5)
    assert (decision["request_id"], decision["router"]) == ("r", "0")
    bench.first.died.set()
    assert set(await bench.client.cluster_metrics()) == {"router:1", f"gateway:{gateway_of(0)}"}
