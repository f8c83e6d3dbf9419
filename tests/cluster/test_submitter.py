"""How a request finds a worker group: what the router is asked, and what becomes of its refusals."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from scripted_cluster import Cluster, deltas_of, request, rest, take

from octavo.cluster import generation, submitter
from octavo.cluster.api.service import RouteWishes
from octavo.worker.errors import Overloaded, Unavailable
from octavo.worker.messages import FinishReason, Pooling, RouteDecision

WISHES = RouteWishes("s", ("a", "b"), ("c",), ("b",))


def refusal(reason: str, retry_after_s: float | None = 7.0, detail: str = "1,024 requests wait") -> RouteDecision:
    return RouteDecision("r", None, 0, 0, reason, retry_after_s, detail=detail)


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(submitter, "RETRY_PAUSE_S", 0.001)
    cluster = Cluster()
    await cluster.service.groups.refresh()
    return cluster


async def start(cluster: Cluster, wishes: RouteWishes) -> str:
    """The group that a request with such wishes comes to."""
    async with asyncio.timeout(5):
        return (await cluster.service.start(request(wishes=wishes))).route.group


async def asked(cluster: Cluster, num_times: int) -> None:
    """The router has been asked so often."""
    async with asyncio.timeout(5):
        while len(cluster.router.queries) < num_times:
            await asyncio.sleep(0.001)


async def test_the_router_is_told_all_that_the_client_wishes(cluster: Cluster) -> None:
    await cluster.service.start(request(wishes=WISHES, queue_timeout_s=9.0, tenant="t"))
    (query,) = cluster.router.queries
    assert (query.session_id, query.tenant, query.attempt) == ("s", "t", 1)
    assert query.allowed_groups == ("a", "b")
    assert query.excluded_groups == ("c",)
    assert query.preferred_groups == ("b",)
    assert query.queue_timeout_s == pytest.approx(9.0, abs=0.5)


@pytest.mark.parametrize(
    ("pooling", "num_prompt_logprobs", "may_be_cached"),
    [(None, None, True), (Pooling.LAST, None, True), (Pooling.MEAN, None, False), (None, 0, False)],
)
async def test_nothing_is_expected_to_be_cached_of_a_prompt_that_is_computed_whole(
    cluster: Cluster, pooling: Pooling | None, num_prompt_logprobs: int | None, may_be_cached: bool
) -> None:
    """The group all the same gets the hashes of what it computes, which others may find."""
    plain = request(pooling=pooling)
    await cluster.service.start(
        replace(plain, sampling=replace(plain.sampling, num_prompt_logprobs=num_prompt_logprobs))
    )
    (query,), (submitted,) = cluster.router.queries, cluster.a.requests
    assert len(submitted.routing_hashes) == 8 * 3
    assert query.routing_hashes == (submitted.routing_hashes if may_be_cached else b"")


async def test_a_request_that_moves_says_so(cluster: Cluster) -> None:
    under_way = await cluster.service.start(request())
    going_on = asyncio.ensure_future(rest(deltas_of(under_way)))
    await cluster.a.die()
    await cluster.b.submitted.wait()
    assert [query.attempt for query in cluster.router.queries] == [1, 2]
    going_on.cancel()


# ---- groups that come up with other weights ----


@pytest.fixture
async def updating(cluster: Cluster) -> Cluster:
    """A request would move from ``a`` to ``b``, which has been updated."""
    cluster.router.weights = {"a": "old", "b": "new"}
    await cluster.service.groups.refresh()
    return cluster


async def test_what_has_no_output_goes_on_with_other_weights(updating: Cluster) -> None:
    going_on = asyncio.ensure_future(rest(deltas_of(await updating.service.start(request()))))
    await updating.a.die()
    await updating.b.submitted.wait()
    await updating.b.give(0, 0, (2,), FinishReason.LENGTH)
    assert [delta.token_ids for delta in await going_on] == [(2,)]


async def test_an_answer_that_has_begun_waits_for_a_group_with_its_weights(updating: Cluster) -> None:
    under_way = await updating.service.start(request())
    await updating.a.give(0, 0, (1,))
    deltas = deltas_of(under_way)
    await take(deltas, 1)
    going_on = asyncio.ensure_future(rest(deltas))
    await updating.a.die()
    await asked(updating, 5)
    assert not updating.b.requests
    updating.router.weights["b"] = "old"
    await updating.service.groups.refresh()
    await updating.b.submitted.wait()
    await updating.b.give(0, 1, (2,), FinishReason.LENGTH)
    assert [delta.token_ids for delta in await going_on] == [(2,)]


async def test_without_such_a_group_it_ends_with_the_reason(updating: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "ROUTE_PATIENCE_S", 0.05)
    under_way = await updating.service.start(request())
    await updating.a.give(0, 0, (1,))
    deltas = deltas_of(under_way)
    await take(deltas, 1)
    await updating.a.die()
    (end,) = await rest(deltas)
    assert (end.token_ids, end.finish_reason) == ((), FinishReason.ABORT)
    assert "no worker group is left that has the weights this answer began with" in (end.error or "")
    assert not updating.b.requests


# ---- suspects ----


@pytest.fixture
async def tried(cluster: Cluster) -> Cluster:
    """Each group has a suspect."""
    for number in (1, 2):
        cluster.service._submitter.trials.begin(f"suspect {number}", number)
    return cluster


async def submitted(cluster: Cluster, is_suspect: bool, patience_s: float) -> int:
    """The generation that a request comes to."""
    wire = generation.wire_request(request(), "g", b"")
    past = generation.Past(is_suspect=is_suspect)
    placement = await cluster.service.submit(wire, RouteWishes(), past, patience_s)
    return placement.decision.generation


async def test_a_suspect_waits_for_a_group_without_one(tried: Cluster) -> None:
    waiting = asyncio.ensure_future(submitted(tried, True, 30.0))
    await asked(tried, 3)
    assert tried.router.queries[-1].excluded_generations == (1, 2)
    assert not waiting.done()
    tried.service.acquit("suspect 2")
    assert await waiting == 2
    assert tried.service._submitter.trials.groups == (1, 2)


async def test_what_is_no_suspect_does_not_wait_for_that(tried: Cluster) -> None:
    assert await submitted(tried, False, 30.0) == 1


async def test_a_suspect_that_has_waited_long_enough_goes_beside_another_one(tried: Cluster) -> None:
    assert await submitted(tried, True, 0.05) == 1


# ---- groups that end in order ----


async def test_a_group_that_drained_has_not_died_of_its_requests(cluster: Cluster) -> None:
    cluster.router.draining = {"a"}
    await cluster.service.groups.refresh()
    under_way = await cluster.service.start(request())
    going_on = asyncio.ensure_future(rest(deltas_of(under_way)))
    await cluster.a.die()
    await cluster.b.submitted.wait()
    assert under_way.suspicion.num_lost == 0
    await cluster.b.give(0, 0, (1,), FinishReason.LENGTH)
    await going_on


# ---- waiting in the router ----


async def test_time_in_the_routers_queue_is_told_counted_and_taken_from_the_limits(cluster: Cluster) -> None:
    cluster.router.wait_s = 0.05
    under_way = await cluster.service.start(request(queue_timeout_s=9.0, timeout_s=5.0))
    assert under_way.route.queued_s >= 0.05
    (submitted,) = cluster.a.requests
    assert (submitted.queue_timeout_s or 0.0) <= 8.95
    assert (submitted.timeout_s or 0.0) <= 4.95
    assert cluster.metrics["m"].router_queue_time.sum == under_way.route.queued_s


async def test_a_request_that_did_not_wait_is_not_counted(cluster: Cluster) -> None:
    assert (await cluster.service.start(request())).route.queued_s == 0.0
    assert cluster.metrics["m"].router_queue_time.sum == 0.0


# ---- refusals ----


@pytest.mark.parametrize("reason", ["queue_full", "tenant_limit", "deadline", "queue_timeout"])
async def test_what_the_router_does_not_let_wait_is_refused_at_once(cluster: Cluster, reason: str) -> None:
    cluster.router.refusal = refusal(reason)
    with pytest.raises(Overloaded, match="1,024 requests wait") as caught:
        await cluster.service.start(request())
    assert (caught.value.retry_after_s, caught.value.reason) == (7.0, reason)
    assert len(cluster.router.queries) == 1


@pytest.mark.parametrize("reason", ["no_group", "unknown_model"])
async def test_a_group_that_may_still_come_is_waited_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(generation, "ROUTE_PATIENCE_S", 0.05)
    cluster.router.refusal = refusal(reason, None, "")
    with pytest.raises(Unavailable, match=reason) as caught:
        await cluster.service.start(request())
    assert (caught.value.retry_after_s, caught.value.reason) == (1.0, reason)
    assert len(cluster.router.queries) > 2


async def test_a_server_that_stops_says_so_at_once(cluster: Cluster) -> None:
    """To what is new; what was under way hears it only when the router lets it go nowhere any more."""
    under_way = await cluster.service.start(request())
    cluster.router.refusal = refusal("stopping", detail="the server is about to stop")
    with pytest.raises(Unavailable, match="about to stop") as caught:
        await cluster.service.start(request())
    assert (caught.value.retry_after_s, caught.value.reason) == (7.0, "stopping")
    await cluster.a.die()
    (end,) = await rest(deltas_of(under_way))
    assert (end.finish_reason, end.error) == (FinishReason.ABORT, "the server is about to stop")
    assert len(cluster.router.queries) == 3


async def test_a_pin_on_a_group_that_nobody_knows_is_refused_at_once(cluster: Cluster) -> None:
    cluster.router.refusal = refusal("not_allowed", None, "there is no group 'z'")
    with pytest.raises(Unavailable, match="there is no group 'z'") as caught:
        await start(cluster, RouteWishes(allowed_groups=("z",)))
    assert caught.value.reason == "not_allowed"
    assert len(cluster.router.queries) == 1


async def test_a_pin_on_a_group_that_is_out_of_reach_waits_for_it(cluster: Cluster) -> None:
    cluster.router.refusal = refusal("not_allowed")
    starting = asyncio.ensure_future(start(cluster, RouteWishes(allowed_groups=("a",))))
    await asked(cluster, 3)
    cluster.router.refusal = None
    assert await starting == "a"


async def test_a_refusal_does_not_end_what_the_client_reads(cluster: Cluster) -> None:
    under_way = await cluster.service.start(request(wishes=RouteWishes(allowed_groups=("z",))))
    deltas = deltas_of(under_way)
    await cluster.a.give(0, 0, (1,))
    await take(deltas, 1)
    going_on = asyncio.ensure_future(rest(deltas))
    for reason in ("queue_full", "not_allowed"):
        cluster.router.refusal = refusal(reason)
        num_asked = len(cluster.router.queries)
        await cluster.a.die()
        await asked(cluster, num_asked + 3)
        assert not going_on.done()
    cluster.router.refusal = None
    await cluster.b.submitted.wait()
    await cluster.b.give(0, 1, (2,), FinishReason.LENGTH)
    assert [delta.token_ids for delta in await going_on] == [(2,)]


async def test_refused_until_its_own_time_is_over_it_ends_with_what_there_is(cluster: Cluster) -> None:
    under_way = await cluster.service.start(request(timeout_s=0.3))
    deltas = deltas_of(under_way)
    await cluster.a.give(0, 0, (1,))
    await take(deltas, 1)
    cluster.router.refusal = refusal("deadline")
    await cluster.a.die()
    assert [delta.finish_reason for delta in await rest(deltas)] == [FinishReason.TIMEOUT]


# ---- without the router ----


async def test_wishes_hold_without_the_router(cluster: Cluster) -> None:
    cluster.router.is_away = True
    assert await start(cluster, RouteWishes(allowed_groups=("b",))) == "b"
    assert await start(cluster, RouteWishes(excluded_groups=("a",))) == "b"
    with pytest.raises(Unavailable) as caught:
        await start(cluster, RouteWishes(allowed_groups=("z",)))
    assert caught.value.reason == "not_allowed"


async def test_of_groups_with_the_same_load_a_preferred_one_is_taken(cluster: Cluster) -> None:
    cluster.router.is_away = True
    assert await start(cluster, RouteWishes(preferred_groups=("b",))) == "b"
    assert await start(cluster, RouteWishes(preferred_groups=("b",))) == "a"
