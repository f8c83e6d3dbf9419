"""The router's whole decision as a gateway sees it: RouterClient, a plain call of the router's actor, a local Ray.

    python tests/bench/route_calls.py [--entries 1000000] [--groups 64] [--rounds 5] [--peers ray|none] [--profile]

The index holds ``router_content.Content``; prompts have 8,192 tokens, 512 blocks. One process is the gateway, one the
router, one all leaders, which report once a second each. So that load does not pile up, requests that are decided are
given up again, 32 with one call that nobody waits for.

    alone            one decision at a time
    hashing          the same from an int32 array of tokens: its hashes are computed first
    64, 256          so many requests wait for a decision at any time; their queries travel together
    CPU              of the router's whole process, and of the gateway's, for each decision

Measured in between, the rounds beginning with another each time: ``echo``, an actor that takes as many bytes and
answers with as many, which is what Ray alone costs; and ``ray``, Ray Serve LLM's prefix router: its tree in the actor
that it lives in, filled with the same content at one character a token (English has four), and its two calls, match
and insert, awaited, where Ray's own router blocks on them. Figures are medians over the rounds. The last line is JSON.

The table after that says where the time goes: lower quartiles of CPU time, in a router of this process that is filled
alike, but for the Ray call, which is the time until an echo is back. ``--profile`` adds the functions of the router
that take most, for bundles of 64.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import ray
from route_parts import ACTOR_OPTIONS, LENGTH, Echo, Figures, hashes_of, report, reports, route_query, stages
from router_content import BLOCK_SIZE, Content, Query, text_of

from octavo.cluster.router_client import MOST_BUNDLE_BYTES, RouterClient
from octavo.router.actor import RouterCore
from octavo.worker.messages import RouteQueries
from octavo.worker.wire import pack

NUM_PROMPTS = 512
NUM_GIVEN_UP = 32
CONCURRENCIES = (64, 256)


class Leaders:
    """All groups' leaders in one process."""

    def __init__(self, core: Any, num_groups: int) -> None:
        self._core, self._num_groups = core, num_groups
        self._handle = ray.get_runtime_context().current_actor

    async def fill(self, num_entries: int) -> None:
        for packed in reports(Content(num_entries, self._num_groups), self._num_groups):
            await self._core.report.remote(packed, self._handle)
        self._reporting = asyncio.create_task(self._report_on())

    async def _report_on(self) -> None:
        for number in itertools.cycle(range(self._num_groups)):
            await self._core.report.remote(pack(report(number)), self._handle)
            await asyncio.sleep(1 / self._num_groups)


@dataclass(frozen=True)
class Run:
    latencies_s: list[float]
    wall_s: float
    actor_cpu_s: float
    gateway_cpu_s: float

    def figures(self, name: str) -> Figures:
        count, cuts = len(self.latencies_s), statistics.quantiles(self.latencies_s, n=100)
        return {
            f"{name} p50 ms": cuts[49] * 1e3,
            f"{name} p99 ms": cuts[98] * 1e3,
            f"{name} decisions/s": count / self.wall_s,
            f"{name} actor CPU us": self.actor_cpu_s / count * 1e6,
            f"{name} gateway CPU us": self.gateway_cpu_s / count * 1e6,
        }


async def closed_loop(
    actor: Any, decide: Callable[[Any], Awaitable[None]], work: Sequence[Any], concurrency: int
) -> Run:
    """Every item of ``work`` once, ``concurrency`` at a time."""
    latencies: list[float] = []
    items = iter(work)

    async def client() -> None:
        for item in items:
            began = time.perf_counter()
            await decide(item)
            latencies.append(time.perf_counter() - began)

    actor_cpu_s, cpu_s, started = await cpu_of(actor), time.process_time(), time.perf_counter()
    await asyncio.gather(*[client() for _ in range(concurrency)])
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
    return Run(latencies, wall_s, await cpu_of(actor) - actor_cpu_s, cpu_s)


async def cpu_of(actor: Any) -> float:
    seconds: float = await actor.__ray_call__.remote(lambda self: time.process_time())
    return seconds


class Octavo:
    name = "octavo"

    def __init__(self, content: Content, num_groups: int) -> None:
        self.content = content
        self.actor = ray.remote(RouterCore).options(**ACTOR_OPTIONS).remote()
        self._leaders = ray.remote(Leaders).options(num_cpus=0).remote(self.actor, num_groups)
        self._numbers = itertools.count()
        self._decided: list[str] = []
        self._found: list[float] = []
        """Of each decision: what its group holds, of the most that any group holds."""

    async def fill(self) -> None:
        await self._leaders.fill.remote(self.content.num_entries)
        self._client = RouterClient("gateway", [lambda: self.actor])
        self._prompts = self.content.held_out(LENGTH, NUM_PROMPTS, 1)
        self.hashes = [hashes_of(query) for query in self._prompts]
        for number in range(NUM_PROMPTS):  # connections, caches, what is learned
            await self._with_hashes(number)
        self._found.clear()

    async def measure(self, count: int, round_number: int) -> Figures:
        numbers = [number % NUM_PROMPTS for number in range(count)]
        figures: Figures = {}
        for name, decide in {"alone": self._with_hashes, "hashing": self._with_tokens}.items():
            figures |= (await closed_loop(self.actor, decide, numbers[: count // 8], 1)).figures(name)
        for concurrency in CONCURRENCIES:
            run = await closed_loop(self.actor, self._with_hashes, numbers, concurrency)
            figures |= run.figures(str(concurrency))
        found, self._found = statistics.mean(self._found), []
        return figures | {"cached, of the most": found}

    async def _with_hashes(self, number: int) -> None:
        await self._decide(number, self.hashes[number])

    async def _with_tokens(self, number: int) -> None:
        await self._decide(number, hashes_of(self._prompts[number]))

    async def _decide(self, number: int, hashes: Any) -> None:
        decision = await self._client.route(route_query(next(self._numbers), hashes))
        self._give_up(decision.request_id)
        if decision.group is None:
            raise AssertionError(f"no group: {decision}")
        self._found.append(decision.expected_cached_tokens / BLOCK_SIZE / self._prompts[number].num_shared_blocks)

    def _give_up(self, request_id: str) -> None:
        self._decided.append(request_id)
        if len(self._decided) == NUM_GIVEN_UP:
            self.actor.route.remote(pack(RouteQueries("gateway", (), tuple(self._decided))))
            self._decided.clear()


class Bare:
    """A call with a query's bytes to an actor that does nothing."""

    name = "echo"

    def __init__(self, octavo: Octavo) -> None:
        self._octavo = octavo
        self.actor = ray.remote(Echo).options(**ACTOR_OPTIONS).remote()

    async def fill(self) -> None:
        self._packed = pack(RouteQueries("gateway", (route_query(0, self._octavo.hashes[0]),)))

    async def measure(self, count: int, round_number: int) -> Figures:
        return (await closed_loop(self.actor, self._call, range(count // 8), 1)).figures("alone")

    async def _call(self, number: int) -> None:
        await self.actor.echo.remote(self._packed, 100)


class RayServe:
    """``PrefixCacheAffinityRouter``'s calls."""

    name = "ray"

    def __init__(self, content: Content, num_groups: int) -> None:
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTreeActor

        self.content = content
        self.actor = PrefixTreeActor.options(num_cpus=0).remote()
        self._tenants = [f"group-{number}" for number in range(num_groups)]

    async def fill(self) -> None:
        await self.actor.add_tenants.remote(self._tenants, 0.0)
        for now, holding in enumerate(self.content.holdings):
            tokens = self.content.prompts[holding.prompt][: holding.num_blocks * BLOCK_SIZE]
            await self.actor.insert.remote(text_of(tokens), self._tenants[holding.group], float(now))

    async def measure(self, count: int, round_number: int) -> Figures:
        """Prompts never seen before: the tree keeps what it is asked."""
        queries = self.content.held_out(LENGTH, count // 4, 2 + round_number)
        alone, together = queries[: count // 16], queries[count // 16 :]
        figures = (await closed_loop(self.actor, self._decide, alone, 1)).figures("alone")
        return figures | (await closed_loop(self.actor, self._decide, together, 64)).figures("64")

    async def _decide(self, query: Query) -> None:
        text = text_of(query.tokens)
        matched, tenants = await self.actor.prefix_match.remote(text, self._tenants)
        if len(matched) < query.num_shared_blocks * BLOCK_SIZE:
            raise AssertionError(f"{len(matched)} characters matched of a prompt with {query.num_shared_blocks} blocks")
        await self.actor.insert.remote(text, tenants[0], time.time())


async def run(entries: int, groups: int, rounds: int, count: int, peers: str) -> dict[str, dict[str, list[float]]]:
    """Who → figure → its value in each round."""
    content = Content(entries, groups)
    octavo = Octavo(content, groups)
    everyone: list[Octavo | Bare | RayServe] = [octavo, Bare(octavo)]
    if peers == "ray":
        try:
            everyone.append(RayServe(content, groups))
        except ImportError as error:
            print(f"ray: skipped, {error}", flush=True)
    for one in everyone:
        began = time.perf_counter()
        await one.fill()
        print(f"{one.name}: filled in {time.perf_counter() - began:.1f} s", flush=True)
    measured: dict[str, dict[str, list[float]]] = {one.name: {} for one in everyone}
    for number in range(rounds):
        for one in everyone[number % len(everyone) :] + everyone[: number % len(everyone)]:
            for name, value in (await one.measure(count, number)).items():
                measured[one.name].setdefault(name, []).append(value)
    return measured


@click.command()
@click.option("--entries", default=1_000_000, show_default=True)
@click.option("--groups", default=64, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--decisions", default=1600, show_default=True, help="of one measurement with others under way")
@click.option("--peers", type=click.Choice(["ray", "none"]), default="ray", show_default=True)
@click.option("--profile", is_flag=True, help="of the router, for bundles of 64")
def main(entries: int, groups: int, rounds: int, decisions: int, peers: str, profile: bool) -> None:
    conditions = {
        "benchmark": "route_calls",
        "entries": entries,
        "groups": groups,
        "prompt_tokens": LENGTH,
        "block_size": BLOCK_SIZE,
        "rounds": rounds,
        "bundle_bytes": MOST_BUNDLE_BYTES,
        "python": platform.python_version(),
        "ray": ray.__version__,
        "numpy": np.__version__,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    measured = asyncio.run(run(entries, groups, rounds, decisions, peers))
    content = Content(entries, groups)
    parts = {
        f"bundles of {n}": asyncio.run(stages(content, groups, n, profile and n > 1)) for n in (1, CONCURRENCIES[0])
    }
    ray.shutdown()
    figures = {
        who: {name: statistics.median(values) for name, values in each.items()} for who, each in measured.items()
    }
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    show(figures, "figure")
    show(parts, "CPU us a decision")
    print(json.dumps({"conditions": conditions, "figures": figures, "parts_us": parts, "rounds": measured}))


def show(columns: dict[str, Figures], title: str) -> None:
    """A table: a row for each figure, a column for each who."""
    print(f"\n{title:28}" + "".join(f"{name:>16}" for name in columns))
    for row in dict.fromkeys(name for figures in columns.values() for name in figures):
        values = [f"{figures[row]:16,.2f}" if row in figures else f"{'–':>16}" for figures in columns.values()]
        print(f"{row:28}" + "".join(values))


if __name__ == "__main__":
    main()
