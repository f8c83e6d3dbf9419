"""What ``route_calls.py`` sends to a router, and the parts of a decision, each measured alone."""

from __future__ import annotations

import cProfile
import itertools
import pstats
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import ray
from router_content import BLOCK_SIZE, Content, Query

from octavo.router.actor import RouterCore
from octavo.worker.messages import (
    BlocksStored,
    GroupReport,
    KVEvents,
    RouteDecisions,
    RouteQueries,
    RouteQuery,
)
from octavo.worker.routing_hash import RoutingHasher, pack_hashes
from octavo.worker.wire import pack, unpack

LENGTH = 8192
NUM_REPEATS = 100
HASHER = RoutingHasher(bytes(range(32)), BLOCK_SIZE)
ACTOR_OPTIONS = {"num_cpus": 0, "max_concurrency": 10_000}

Figures = dict[str, float]
Send = Callable[[bytes], Awaitable[Any]]


def hashes_of(query: Query) -> Any:
    return pack_hashes(HASHER.hash_blocks(query.tokens))


def reports(content: Content, num_groups: int) -> Iterator[bytes]:
    """The first report of each group, with everything that it holds."""
    hashes = [HASHER.hash_blocks(tokens) for tokens in content.prompts]
    held: list[list[BlocksStored]] = [[] for _ in range(num_groups)]
    for holding in content.holdings:
        held[holding.group].append(BlocksStored(None, pack_hashes(hashes[holding.prompt][: holding.num_blocks])))
    for number, events in enumerate(held):
        yield pack(report(number, (KVEvents(number + 1, 0, tuple(events)),)))


def report(number: int, events: tuple[KVEvents, ...] = ()) -> GroupReport:
    """An idle group with room for everything."""
    return GroupReport(
        model="m",
        group=f"group-{number}",
        generation=number + 1,
        block_size=BLOCK_SIZE,
        num_blocks=200_000,
        num_free_blocks=150_000,
        max_num_seqs=1024,
        num_running=0,
        num_waiting=0,
        num_uncomputed_prompt_tokens=0,
        prefill_tokens_per_s=20_000.0,
        decode_step_s=0.01,
        draining=False,
        progress=(),
        events=events,
    )


def route_query(number: int, hashes: Any) -> RouteQuery:
    return RouteQuery(f"request-{number:026}", "m", hashes, LENGTH, 256)


class Echo:
    """Answers with so many bytes: what is left of a call of the router without the router."""

    async def echo(self, packed: bytes, num_bytes: int) -> bytes:
        return bytes(num_bytes)


async def stages(content: Content, num_groups: int, bundle: int, profile: bool) -> Figures:
    """µs for each query, in calls of ``bundle`` of them."""
    core = RouterCore(clock=lambda: 0.0)  # no group is ever silent for too long
    for packed in reports(content, num_groups):
        await core.report(packed, None)
    hashes = [hashes_of(query) for query in content.held_out(LENGTH, 64, 1)]
    messages = [bundle_of(hashes, first, bundle) for first in range(0, 20 * bundle, bundle)]
    asked = [pack(message) for message in messages]
    answered = [await core.route(packed) for packed in asked]
    if any(decision.group is None for packed in answered for decision in unpack(packed, RouteDecisions).decisions):
        raise AssertionError("a query was refused or has to wait: its decision is not what is to be measured")
    timed = {
        "pack the queries": lower_quartile(messages, pack),
        "unpack them": lower_quartile(asked, lambda packed: unpack(packed, RouteQueries)),
        "pack the decisions": lower_quartile([unpack(packed, RouteDecisions) for packed in answered], pack),
        "unpack them ": lower_quartile(answered, lambda packed: unpack(packed, RouteDecisions)),
    }
    whole = await lower_quartile_of_calls(asked, core.route, time.thread_time)
    timed["decide"] = whole - timed["unpack them"] - timed["pack the decisions"]
    timed["the router's call in all"] = whole
    echo = ray.remote(Echo).options(**ACTOR_OPTIONS).remote()
    timed["Ray call"] = await lower_quartile_of_calls(
        asked, lambda packed: echo.echo.remote(packed, len(answered[0])), time.perf_counter
    )
    if profile:
        await print_profile(core, asked)
    return {name: seconds / bundle * 1e6 for name, seconds in timed.items()} | {
        "bytes of a query": len(asked[0]) / bundle
    }


def bundle_of(hashes: Sequence[Any], first: int, count: int) -> RouteQueries:
    """Queries from ``first`` on; those of the bundle before are given up."""
    queries = [route_query(number, hashes[number % len(hashes)]) for number in range(first, first + count)]
    cancelled = [route_query(number, ()).request_id for number in range(first - count, first)]
    return RouteQueries("gateway", tuple(queries), tuple(cancelled))


def lower_quartile(items: Sequence[Any], run: Callable[[Any], object]) -> float:
    """CPU seconds of one run."""
    times = []
    for item in itertools.islice(itertools.cycle(items), NUM_REPEATS):
        began = time.thread_time()
        run(item)
        times.append(time.thread_time() - began)
    return statistics.quantiles(times, n=4)[0]


async def lower_quartile_of_calls(items: Sequence[bytes], send: Send, clock: Callable[[], float]) -> float:
    times = []
    for item in itertools.islice(itertools.cycle(items), NUM_REPEATS):
        began = clock()
        await send(item)
        times.append(clock() - began)
    return statistics.quantiles(times, n=4)[0]


async def print_profile(core: RouterCore, asked: Sequence[bytes]) -> None:
    with cProfile.Profile() as profile:
        for packed in itertools.islice(itertools.cycle(asked), 200):
            await core.route(packed)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)
