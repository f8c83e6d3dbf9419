"""Requests of several branches on their way through the data plane, against leaders that do as they are told."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_cluster import PROMPT, Cluster, deltas_of, request, rest, take

from octavo.cluster import generation, submitter
from octavo.cluster.api.service import GenerationRequest, TokenDelta
from octavo.worker.admission import Refusal
from octavo.worker.errors import Overloaded, Unavailable
from octavo.worker.messages import Branch, FinishReason, SamplingParams, SequenceUpdate
from octavo.worker.routing_hash import HASH_BYTES


@pytest.fixture
async def cluster() -> Cluster:
    cluster = Cluster()
    await cluster.service.groups.refresh()
    return cluster


def is_idle(cluster: Cluster) -> bool:
    clients = cluster.service.groups.clients.values()
    return all(client.is_idle and client.outstanding_tokens == 0 for client in clients)


# ---- one request, several branches ----


async def test_all_branches_travel_in_one_request(cluster: Cluster) -> None:
    """What has gathered of a branch before it is read comes in one delta."""
    under_way = await cluster.service.start(request(3))
    assert cluster.a.requests[0].branches == (Branch(0), Branch(1), Branch(2))
    assert cluster.a.requests[0].sampling.seed == 7
    assert len(cluster.a.requests[0].routing_hashes) == 3 * HASH_BYTES
    await cluster.a.give(1, 0, (5,), num_cached_tokens=32)
    await cluster.a.give(0, 0, (6, 7), FinishReason.STOP, num_cached_tokens=32)
    await cluster.a.give(2, 0, (), FinishReason.LENGTH, num_cached_tokens=32)
    await cluster.a.give(1, 1, (8,), FinishReason.LENGTH)
    assert await rest(deltas_of(under_way)) == [
        TokenDelta((5, 8), FinishReason.LENGTH, 32, branch=1),
        TokenDelta((6, 7), FinishReason.STOP, branch=0),
        TokenDelta((), FinishReason.LENGTH, branch=2),
    ]
    assert cluster.a.aborts == []
    assert is_idle(cluster)


async def test_case_bug_078_a_branch_is_ended_alone(cluster: Cluster) -> None:
    """What was on its way of it is dropped; with the last branch the request is over."""
    under_way = await cluster.service.start(request(2))
    deltas = deltas_of(under_way)
    await cluster.a.give(0, 0, (5,))
    await take(deltas, 1)
    under_way.end(0)
    under_way.end(0)
    await cluster.a.give(0, 1, (6,))
    await cluster.a.give(1, 0, (7,))
    await cluster.a.give(0, 2, (), FinishReason.ABORT)
    assert await take(deltas, 1) == [TokenDelta((7,), branch=1)]
    assert cluster.a.aborts == [("r", 0)]
    under_way.end(1)
    assert await rest(deltas) == []
    await asyncio.sleep(0)
    assert cluster.a.aborts == [("r", 0), ("r", None)]
    assert is_idle(cluster)


async def test_case_bug_078_aborting_ends_every_branch_once(cluster: Cluster) -> None:
    under_way = await cluster.service.start(request(4))
    deltas = deltas_of(under_way)
    await cluster.a.give(2, 0, (5,), FinishReason.STOP)
    await take(deltas, 1)
    under_way.abort()
    under_way.abort()
    under_way.end(1)
    await asyncio.sleep(0)
    assert cluster.a.aborts == [("r", None)]
    assert is_idle(cluster)


# ---- fail-over ----


async def test_case_bug_091_only_the_branches_that_have_not_ended_go_on(cluster: Cluster) -> None:
    under_way = await cluster.service.start(request(4, queue_timeout_s=9.0))
    deltas = deltas_of(under_way)
    await cluster.a.give(0, 0, (1, 2))
    await cluster.a.give(1, 0, (3,), FinishReason.STOP)
    await cluster.a.give(2, 0, (4,))
    await take(deltas, 3)
    under_way.end(2)
    await cluster.a.die()
    going_on = asyncio.ensure_future(rest(deltas))
    await cluster.b.submitted.wait()
    (again,) = cluster.b.requests
    assert again.branches == (Branch(0, (1, 2)), Branch(3))
    assert (again.attempt, again.queue_timeout_s) == (2, None)
    await cluster.b.give(0, 0, (1, 2, 5), FinishReason.STOP, num_cached_tokens=48)
    await cluster.b.give(3, 0, (6,), FinishReason.LENGTH)
    first, second = await going_on
    assert (first.branch, first.token_ids, first.finish_reason) == (0, (5,), FinishReason.STOP)
    assert (second.branch, second.token_ids, second.finish_reason) == (3, (6,), FinishReason.LENGTH)
    assert cluster.metrics["m"].failovers._value.get() == 1
    assert is_idle(cluster)


async def test_a_request_without_output_keeps_its_queue_timeout(cluster: Cluster) -> None:
    under_way = await cluster.service.start(request(2, queue_timeout_s=9.0))
    going_on = asyncio.ensure_future(rest(deltas_of(under_way)))
    await cluster.a.die()
    await cluster.b.submitted.wait()
    assert cluster.b.requests[0].queue_timeout_s == pytest.approx(9.0, abs=0.5)
    going_on.cancel()


async def test_a_beam_search_begins_again_from_the_prompt(cluster: Cluster) -> None:
    under_way = await cluster.service.start(request(2, beam_width=4, queue_timeout_s=9.0))
    going_on = asyncio.ensure_future(rest(deltas_of(under_way)))
    await cluster.a.die()
    await cluster.b.submitted.wait()
    (again,) = cluster.b.requests
    assert again.branches == (Branch(0), Branch(1))
    assert again.queue_timeout_s == pytest.approx(9.0, abs=0.5)
    await cluster.b.give(0, 0, (1, 2), FinishReason.STOP)
    await cluster.b.give(1, 0, (3,), FinishReason.LENGTH)
    assert [(delta.branch, delta.token_ids) for delta in await going_on] == [(0, (1, 2)), (1, (3,))]


async def test_when_nobody_can_go_on_every_branch_ends_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "ROUTE_PATIENCE_S", 0.0)
    under_way = await cluster.service.start(request(3))
    deltas = deltas_of(under_way)
    await cluster.a.give(1, 0, (3,), FinishReason.STOP)
    await take(deltas, 1)
    await cluster.b.die()
    await cluster.a.die()
    ends = await rest(deltas)
    assert [(delta.branch, delta.finish_reason) for delta in ends] == [
        (0, FinishReason.ABORT),
        (2, FinishReason.ABORT),
    ]
    assert is_idle(cluster)


streams = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(streams, st.data())
def test_branches_over_two_groups_are_what_one_group_gives(outputs: list[list[int]], data: st.DataObject) -> None:
    """Any part of any branch comes from the first group, the rest from the second; nothing twice, nothing missing."""
    sent = [data.draw(st.integers(0, len(output)), label="sent before the loss") for output in outputs]

    async def run() -> dict[int, list[int]]:
        cluster = Cluster()
        under_way = await cluster.service.start(request(len(outputs)))
        deltas = deltas_of(under_way)
        got: dict[int, list[int]] = defaultdict(list)
        ended: set[int] = set()
        await cluster.a.give_all(*[_part(branch, 0, outputs[branch][:num]) for branch, num in enumerate(sent) if num])

        async def read() -> None:
            async for delta in deltas:
                assert delta.branch not in ended
                got[delta.branch] += delta.token_ids
                ended.update({delta.branch} if delta.finish_reason else ())

        reading = asyncio.ensure_future(read())
        while sum(map(len, got.values())) < sum(sent):
            await asyncio.sleep(0)
        await cluster.a.die()
        await cluster.b.submitted.wait()
        starts = {branch.index: len(branch.output_token_ids) for branch in cluster.b.requests[0].branches}
        assert starts == dict(enumerate(sent))
        rest_of = [(branch, start, outputs[branch][start:]) for branch, start in starts.items()]
        await cluster.b.give_all(*[_part(*part, FinishReason.LENGTH) for part in rest_of])
        await asyncio.wait_for(reading, 10)
        assert ended == set(range(len(outputs)))
        return got

    got = asyncio.run(run())
    assert [got[branch] for branch in range(len(outputs))] == outputs


def _part(branch: int, position: int, tokens: list[int], reason: FinishReason | None = None) -> SequenceUpdate:
    return SequenceUpdate("r", branch, position, tuple(tokens), reason)


# ---- full queues ----


async def test_a_full_group_is_passed_over_and_is_not_dead(cluster: Cluster) -> None:
    cluster.a.refusal = Refusal("the queue holds 10 requests", 4.0)
    under_way = await cluster.service.start(request(2))
    assert under_way.route.group == "b"
    assert [query.excluded_generations for query in cluster.router.queries] == [(), (1,)]
    cluster.a.refusal = None
    assert (await cluster.service.start(request())).route.group == "a"


@pytest.mark.parametrize("beam_width", [None, 4])
async def test_when_all_are_full_the_request_is_refused_at_once(cluster: Cluster, beam_width: int | None) -> None:
    cluster.a.refusal = Refusal("10 requests wait", 4.0)
    cluster.b.refusal = Refusal("20 requests wait", 2.5)
    with pytest.raises(Overloaded, match="20 requests wait") as caught:
        async with asyncio.timeout(5):
            await cluster.service.start(request(2, beam_width))
    assert caught.value.retry_after_s == 2.5
    assert len(cluster.router.queries) == 3
    assert is_idle(cluster)


async def test_full_and_lost_groups_together_are_an_overload(cluster: Cluster) -> None:
    cluster.a.refusal = Refusal("10 requests wait", 4.0)
    await cluster.b.die()
    with pytest.raises(Overloaded, match="10 requests wait"):
        await cluster.service.start(request())


async def test_a_request_under_way_waits_for_room(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitter, "RETRY_PAUSE_S", 0.001)
    under_way = await cluster.service.start(request())
    deltas = deltas_of(under_way)
    await cluster.a.give(0, 0, (1,))
    await take(deltas, 1)
    cluster.b.refusal = Refusal("full", 2.0)
    going_on = asyncio.ensure_future(rest(deltas))
    await cluster.a.die()
    while len(cluster.router.queries) < 6:
        await asyncio.sleep(0.001)
    assert not going_on.done()
    cluster.b.refusal = None
    await cluster.b.submitted.wait()
    await cluster.b.give(0, 1, (2,), FinishReason.LENGTH)
    assert [delta.token_ids for delta in await going_on] == [(2,)]


async def test_a_queue_that_stays_full_ends_it_as_an_overload(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = await cluster.service.start(request(2))
    monkeypatch.setattr(generation, "ROUTE_PATIENCE_S", 0.0)
    cluster.b.refusal = Refusal("full", 2.0)
    await cluster.a.die()
    ends = await rest(deltas_of(under_way))
    assert [(end.finish_reason, end.error, end.retry_after_s) for end in ends] == [
        (FinishReason.OVERLOADED, "full", 2.0)
    ] * 2


async def test_what_a_leader_says_of_its_queue_arrives(cluster: Cluster) -> None:
    under_way = await cluster.service.start(request(queue_timeout_s=2.0))
    assert cluster.a.requests[0].queue_timeout_s == pytest.approx(2.0, abs=0.5)
    await cluster.a.give(0, 0, (), FinishReason.OVERLOADED, error="waited", retry_after_s=3.0)
    (end,) = await rest(deltas_of(under_way))
    assert (end.finish_reason, end.error, end.retry_after_s) == (FinishReason.OVERLOADED, "waited", 3.0)


async def test_no_request_waits_for_a_group_longer_than_its_queue_timeout(cluster: Cluster) -> None:
    await cluster.a.die()
    await cluster.b.die()
    with pytest.raises(Unavailable):
        async with asyncio.timeout(5):
            await cluster.service.start(request(queue_timeout_s=0.05))


# ---- what the router and the fallback are told ----


@pytest.mark.parametrize(("num_branches", "beam_width", "expected"), [(1, None, 1), (3, None, 3), (2, 5, 5)])
async def test_every_sequence_counts(
    cluster: Cluster, num_branches: int, beam_width: int | None, expected: int
) -> None:
    await cluster.service.start(request(num_branches, beam_width))
    assert cluster.router.queries[0].num_branches == expected
    assert cluster.service.groups.clients[1].outstanding_tokens == len(PROMPT) + 20 * expected


async def test_without_the_router_a_wide_request_weighs_more(cluster: Cluster) -> None:
    cluster.router.is_away = True
    groups = []
    for number, num_branches in enumerate([8, 1, 1]):
        wide = GenerationRequest(f"r{number}", "m", PROMPT, SamplingParams(20, seed=7), num_branches=num_branches)
        groups.append((await cluster.service.start(wide)).route.group)
    assert groups == ["a", "b", "b"]


async def test_a_request_that_does_without_the_cache_names_no_blocks(cluster: Cluster) -> None:
    await cluster.service.start(request(use_prefix_cache=False))
    assert cluster.router.queries[0].routing_hashes == b""
    assert cluster.a.requests[0].routing_hashes == b""
    assert cluster.a.requests[0].use_prefix_cache is False


# ---- resetting the caches ----


async def test_every_group_forgets_and_says_how_much(cluster: Cluster) -> None:
    cluster.b.num_forgotten = None
    assert await cluster.service.reset_prefix_cache() == {"a": 5, "b": None}
    cluster.a.num_forgotten = None
    with pytest.raises(Unavailable):
        await cluster.service.reset_prefix_cache()
