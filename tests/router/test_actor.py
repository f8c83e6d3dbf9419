"""The actor's class, without Ray: bytes in, bytes out."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from octavo.router.actor import RouterCore
from octavo.worker.messages import BlocksStored, Registry, RouteDecisions, RouteQueries
from octavo.worker.routing_hash import pack_hashes
from octavo.worker.wire import WireError, pack, unpack


async def test_reports_make_a_registry_with_handles_and_routes(new_leader: Any, asker: Any) -> None:
    core, leader = RouterCore(), new_leader("a", generation=7)
    assert await core.report(pack(leader.report()), "handle of a") is True
    leader.tell_snapshot()
    assert await core.report(pack(leader.report()), "handle of a") is False
    packed, handles = await core.registry()
    (entry,) = unpack(packed, Registry).entries
    assert (entry.group, entry.generation, handles) == ("a", 7, ["handle of a"])
    query = asker.query([1] * 20)
    (decision,) = unpack(await core.route(pack(RouteQueries("g", (query,)))), RouteDecisions).decisions
    assert (decision.request_id, decision.group, decision.generation) == (query.request_id, "a", 7)
    assert (await core.explain(1))[0]["group"] == "a"
    assert await core.health() is True


async def test_a_void_generation_does_not_take_the_handle(new_leader: Any) -> None:
    core = RouterCore()
    for generation, handle in ((8, "new"), (7, "old")):
        await core.report(pack(new_leader("a", generation=generation).report()), handle)
    assert (await core.registry())[1] == ["new"]


async def test_metrics_come_from_all_that_were_heard(new_leader: Any) -> None:
    core = RouterCore()
    await core.report(pack(new_leader("a").report()), None)
    await core.report_gateway("g1", "octavo_requests 1\n")
    await core.report_gateway("g1", "")
    metrics = await core.cluster_metrics()
    assert metrics["gateway:g1"] == "octavo_requests 1\n"
    assert "octavo_router_groups" in metrics["router"]


async def test_metrics_of_what_has_gone_silent_vanish(new_leader: Any) -> None:
    now = [0.0]
    core = RouterCore(clock=lambda: now[0])
    await core.report_gateway("g1", "octavo_a 1\n")
    now[0] = 9.0
    await core.report_gateway("g2", "octavo_b 1\n")
    assert set(await core.cluster_metrics()) == {"router", "gateway:g1", "gateway:g2"}
    now[0] = 11.0
    assert set(await core.cluster_metrics()) == {"router", "gateway:g2"}


async def test_bytes_that_are_no_message_disturb_nothing(new_leader: Any) -> None:
    core = RouterCore()
    await core.report(pack(new_leader("a").report()), None)
    for broken in (b"", b"\xc1", pack(RouteQueries("g", ()))[:-1]):
        with pytest.raises(WireError):
            await core.route(broken)
        with pytest.raises(WireError):
            await core.report(broken, None)
    assert len(unpack((await core.registry())[0], Registry).entries) == 1


async def test_when_the_application_is_about_to_stop_every_group_is_draining(new_leader: Any) -> None:
    core = RouterCore()
    await core.report(pack(new_leader("a").report()), None)
    await core.drain()
    assert [entry.draining for entry in unpack((await core.registry())[0], Registry).entries] == [True]


async def test_before_it_stops_what_is_new_is_refused_and_what_was_under_way_may_move(
    new_leader: Any, asker: Any
) -> None:
    core = RouterCore()
    for number, name in enumerate(("a", "b"), start=1):
        await core.report(pack(new_leader(name, generation=number).report()), None)

    async def ask(query: Any) -> Any:
        return unpack(await core.route(pack(RouteQueries("g", (query,)))), RouteDecisions).decisions[0]

    under_way = asker.query([1] * 20)
    first = await ask(under_way)
    assert first.group in ("a", "b")
    await core.drain()
    assert await core.num_under_way() == 1
    refused = await ask(asker.query([1] * 20))
    assert (refused.group, refused.reason) == (None, "stopping")
    assert refused.retry_after_s == 5.0
    assert (await ask(under_way)).group in ("a", "b"), "its answer was lost, and it is asked again"
    moved = await ask(replace(under_way, attempt=2, excluded_generations=(first.generation,)))
    assert moved.group in {"a", "b"} - {first.group}
    await core.end()
    assert (await ask(replace(under_way, attempt=3))).reason == "stopping"


async def test_a_large_report_lets_queries_pass_before_the_next(new_leader: Any, asker: Any) -> None:
    """Three groups send 10,000 blocks each at the same moment, and a query comes behind them."""
    core = RouterCore()
    order: list[str] = []

    async def report(name: str) -> None:
        leader = new_leader(name, generation=ord(name))
        leader.tell(BlocksStored(None, pack_hashes(range(1, 10_001))))
        await core.report(pack(leader.report()), None)
        order.append(name)

    async def ask() -> None:
        await core.route(pack(RouteQueries("g", (asker.query([1] * 20),))))
        order.append("query")

    await asyncio.gather(report("a"), report("b"), report("c"), ask())
    assert order.index("query") < order.index("b")
    assert len(unpack((await core.registry())[0], Registry).entries) == 3
