"""How a request finds a worker group: what the router is asked, and what becomes of its refusals."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from scripted_cluster import Cluster, request, rest, take

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
    going_on = asyncio.ensure_future(rest(under_way.tokens()))
    await cluster.a.die()
    await cluster.b.submitted.wait()
    assert [query.attempt for query in cluster.router.queries] == [1, 2]
    going_on.cancel()


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
    deltas = under_way.tokens()
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
    deltas = under_way.tokens()
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
