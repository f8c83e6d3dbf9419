"""What the actor carries between a Router with a queue, its gateways and its peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fake_router import FakeRouter

from octavo.router.actor import GATEWAY_SILENCE_S, RouterCore
from octavo.router.peers import Peer
from octavo.worker.messages import (
    RouteDecisions,
    RouteQueries,
    RouteQuery,
    SharedReservation,
    SharedReservations,
)
from octavo.worker.wire import pack, unpack

LONG_S = 60.0


class Bench:
    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self.router = FakeRouter()
        self.core = RouterCore(clock=lambda: self.now, router=self.router, **options)  # type: ignore[arg-type]

    async def ask(self, *request_ids: str, gateway: str = "g", cancelled: tuple[str, ...] = ()) -> RouteDecisions:
        queries = RouteQueries(gateway, tuple(query(request_id) for request_id in request_ids), cancelled)
        return unpack(await self.core.route(pack(queries)), RouteDecisions)

    async def turns(self, acknowledged: int, gateway: str = "g", timeout_s: float = LONG_S) -> RouteDecisions:
        return unpack(await self.core.turns(gateway, acknowledged, timeout_s), RouteDecisions)


def query(request_id: str) -> RouteQuery:
    return RouteQuery(request_id, "m", b"", 10, 10)


def names(turns: RouteDecisions) -> list[str]:
    return [decision.request_id for decision in turns.decisions]


async def test_a_queued_query_is_decided_later_and_told_to_its_gateway_alone() -> None:
    bench = Bench()
    bench.router.is_full = True
    assert all(decision.queued for decision in (await bench.ask("r", "s")).decisions)
    await bench.ask("other", gateway="h")
    start = (await bench.turns(0)).last_number
    poll = asyncio.create_task(bench.turns(start))
    await asyncio.sleep(0)
    assert not poll.done()
    bench.router.let_go("s")
    turns = await poll
    assert names(turns) == ["s"]
    assert not turns.decisions[0].queued
    assert names(await bench.turns(0, gateway="h")) == []


async def test_a_lost_answer_is_repeated_until_it_is_acknowledged() -> None:
    bench = Bench()
    bench.router.is_full = True
    await bench.ask("r", "s")
    start = (await bench.turns(0)).last_number
    bench.router.let_go("r")
    first = await bench.turns(start)
    assert await bench.turns(start) == first
    bench.router.let_go("s")
    await bench.ask()
    assert names(await bench.turns(start)) == ["r", "s"]
    second = await bench.turns(first.last_number)
    assert names(second) == ["s"]
    assert names(await bench.turns(second.last_number, timeout_s=0.0)) == []


async def test_a_gateway_that_does_not_come_for_its_turns_is_given_up_and_learns_of_it() -> None:
    bench = Bench()
    bench.router.is_full = True
    await bench.ask("r", "s", "t", "u")
    await bench.ask("other", gateway="h")
    start = (await bench.turns(0)).last_number
    await bench.ask(cancelled=("t",))
    bench.router.let_go("u")
    await bench.ask()
    assert names(await bench.turns(start)) == ["u"]
    bench.router.let_go("s")
    await bench.ask()
    bench.router.cancelled.clear()
    bench.now = GATEWAY_SILENCE_S + 1.0
    await bench.turns(0, gateway="h")
    while not bench.router.cancelled:
        await asyncio.sleep(0.01)
    assert set(bench.router.cancelled) == {"r", "s"}  # u may be running, its gateway has been told
    assert await bench.turns(start) == RouteDecisions((), 0)


async def test_what_was_decided_is_void_when_its_request_is_given_up_or_asked_anew() -> None:
    bench = Bench()
    bench.router.is_full = True
    await bench.ask("r", "s", "t")
    start = (await bench.turns(0)).last_number
    for name in "rst":
        bench.router.let_go(name)
    await bench.ask()
    await bench.ask("r", cancelled=("t",))
    turns = await bench.turns(start)
    assert names(turns) == ["s"]
    bench.router.let_go("r")
    await bench.ask()
    assert names(await bench.turns(turns.last_number)) == ["r"]


async def test_nothing_runs_on_when_nobody_waits() -> None:
    bench = Bench()
    bench.router.is_full = True
    await bench.ask("r")
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert len(others) == 1
    await bench.ask(cancelled=("r",))
    await asyncio.wait_for(asyncio.gather(*others), LONG_S)


# ---- failures ----


async def test_a_query_that_the_router_fails_on_is_answered_beside_the_others() -> None:
    bench = Bench()
    bench.router.fails_on = "bad"
    first, bad, last = (await bench.ask("first", "bad", "last")).decisions
    assert (first.group, bad.group, last.group) == ("a", None, "a")
    assert (bad.request_id, bad.reason) == ("bad", "error")
    assert bench.router.cancelled == ["bad"]  # whatever of it was noted before
    assert bench.router.counters.failures == {"route": 1}


async def test_a_report_that_the_router_fails_on_is_answered(new_leader: Any) -> None:
    bench = Bench()
    bench.router.fails_on = "bad"
    wants = [await bench.core.report(pack(new_leader(name).report()), None) for name in ("bad", "good")]
    assert wants == [False, True]
    assert bench.router.counters.failures == {"report": 1}


async def test_a_queue_that_the_router_fails_on_takes_no_answer_away() -> None:
    bench = Bench()
    bench.router.take_turns = lambda now: {}[now]  # type: ignore[method-assign,misc]
    assert (await bench.ask("r")).decisions[0].group == "a"
    assert bench.router.counters.failures == {"take_turns": 1}


# ---- peers ----


class Actor:
    """Another router; its answers can be held up, or fail."""

    def __init__(self) -> None:
        self.told: list[SharedReservations] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.failure: Exception | None = None
        self.num_found = 0
        self.shared = self

    def find(self) -> Actor:
        self.num_found += 1
        return self

    def remote(self, packed: bytes) -> asyncio.Future[None]:
        async def answer() -> None:
            if self.failure:
                raise self.failure
            self.told.append(unpack(packed, SharedReservations))
            await self.may_answer.wait()

        return asyncio.ensure_future(answer())

    def names(self) -> list[list[str]]:
        return [[each.query.request_id for each in shared.reservations] for shared in self.told]

    def has_heard_of(self, *request_ids: str) -> Callable[[], bool]:
        return lambda: [name for told in self.names() for name in told] == list(request_ids)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_decisions_are_shared_with_every_other_router_and_adopted_there() -> None:
    actors = [Actor(), Actor()]
    bench = Bench(find_peers=[actor.find for actor in actors])
    await bench.ask("r")
    bench.router.is_full = True
    await bench.ask("s")
    bench.router.let_go("s")
    await bench.ask()
    for actor in actors:
        await until(actor.has_heard_of("r", "s"))
    other = Bench()
    for shared in actors[0].told:
        await other.core.shared(pack(shared))
    assert other.router.adopted == actors[0].told


async def test_a_peer_is_told_one_thing_at_a_time_and_what_comes_meanwhile_together() -> None:
    actor = Actor()
    bench = Bench(find_peers=[actor.find])
    actor.may_answer.clear()
    await bench.ask("a")
    await until(lambda: bool(actor.told))
    for request_id in "bcd":
        await bench.ask(request_id)
    assert actor.names() == [["a"]]
    actor.may_answer.set()
    await until(lambda: len(actor.told) == 2)
    assert actor.names() == [["a"], ["b", "c", "d"]]


async def test_what_was_given_up_before_a_peer_was_told_of_it_is_not_reserved_there() -> None:
    """Told together, what is given up comes first."""
    actor = Actor()
    peer = Peer(actor.find)
    actor.may_answer.clear()
    peer.tell(shared("a"))
    await until(lambda: bool(actor.told))
    for news in (shared("b"), shared("c", cancelled="b"), shared("b", cancelled="c"), shared("d")):
        peer.tell(news)
    actor.may_answer.set()
    await until(lambda: len(actor.told) == 2)
    assert actor.names()[1] == ["b", "d"]
    assert actor.told[1].cancelled == ("b", "c")


async def test_a_peer_that_is_away_is_left_alone_for_a_while_and_looked_up_again() -> None:
    actor = Actor()
    peer = Peer(actor.find)
    actor.failure = RuntimeError("gone")
    peer.tell(shared("a"))
    await until(lambda: peer._away_until_s > 0.0)
    actor.failure = None
    peer.tell(shared("lost"))
    peer._away_until_s = 0.0
    peer.tell(shared("b"))
    await until(lambda: bool(actor.told))
    assert actor.names() == [["b"]]
    assert actor.num_found == 2


def shared(request_id: str, *, cancelled: str = "") -> SharedReservations:
    return SharedReservations((SharedReservation(query(request_id), "a", 1, 0),), tuple(cancelled))


async def test_metrics_of_several_routers_are_told_apart() -> None:
    alone, one = Bench(), Bench(name="1")
    text = 'octavo_router_groups{model="m"} 1\noctavo_router_queued 0\n'
    assert (await alone.core.cluster_metrics())["router"].startswith(text)
    labelled = 'octavo_router_groups{router="1",model="m"} 1\noctavo_router_queued{router="1"} 0\n'
    of_one = (await one.core.cluster_metrics())["router"]
    assert of_one.startswith(labelled)
    assert 'octavo_process_threads{router="1",role="router"} ' in of_one
