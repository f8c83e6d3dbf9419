"""How soon a router that was killed is exact again, in a local Ray, and what queries wait for meanwhile.

    python tests/bench/router_restart.py [--blocks 200000] [--groups 2] [--chain 32] [--rounds 3]

One process for each leader: the production engine loop and report task around a prefix cache that is filled with
chains of blocks; its device is never asked. The router is killed and another one started under its name, as the
deployment does. Times count from the first answer of the new one.

    all groups     every leader has reported
    exact          and its snapshot is complete
    walk           of one leader's cache, in the engine's thread: steps wait for it
    query          the slowest of the route calls that came one after the other while snapshots were taken in
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from concurrent.futures import Future
from typing import Any

import click
import numpy as np
import ray

from octavo.router.actor import RouterCore
from octavo.worker.engine import Engine
from octavo.worker.engine_loop import EngineLoop
from octavo.worker.messages import Registry, RouteQueries, RouteQuery
from octavo.worker.report_book import GroupIdentity, ReportBook
from octavo.worker.reporter import PERIOD_S, Reporter
from octavo.worker.routing_hash import RoutingHasher, pack_hashes
from octavo.worker.sampling_row import StepResult
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.wire import pack, unpack

NAME, NAMESPACE = "router", "bench"
BLOCK_SIZE = 16
HASHER = RoutingHasher(bytes(16), BLOCK_SIZE)
OPTIONS = {"num_cpus": 0, "max_concurrency": 1000, "namespace": NAMESPACE}


class NoDevice:
    def launch(self, plan: Any, rows: Any) -> Future[StepResult]:
        raise RuntimeError("nothing is to be computed")

    def heartbeat(self) -> None: ...

    def shut_down(self) -> None: ...


class Leader:
    """A leader's actor without a model."""

    def __init__(self, number: int, num_blocks: int, chain: int) -> None:
        self._number, self._num_blocks, self._chain = number, num_blocks, chain

    async def start(self) -> float:
        """Fill the cache and report for ever; seconds that a snapshot of it takes."""
        identity = GroupIdentity("m", f"group-{self._number}", self._number + 1, BLOCK_SIZE, self._num_blocks, 64)
        self._loop = EngineLoop(
            self._engine, NoDevice(), ReportBook(identity, lambda engine: "", (NAME,)), self._number + 1
        )
        walk_s = await self._loop.ask(self._fill)
        reporter = Reporter(self._loop, NAME, NAMESPACE, ray.get_runtime_context().current_actor)
        self._tasks = [asyncio.create_task(reporter.run()), asyncio.create_task(self._render_metrics())]
        return walk_s

    async def _render_metrics(self) -> None:
        while True:
            self._loop.render_metrics()
            await asyncio.sleep(PERIOD_S)

    def _engine(self, emit: Any) -> Engine:
        limits = SchedulerLimits(self._num_blocks, BLOCK_SIZE, 64, 512, 4096)
        return Engine(Scheduler(limits, HASHER), NoDevice(), clock=time.monotonic, emit=emit)

    def _fill(self, engine: Engine) -> float:
        cache, pool = engine.scheduler.cache, engine.scheduler.pool
        hashes = np.random.default_rng(self._number).integers(1, 1 << 63, self._num_blocks).tolist()
        parent = None
        for index, value in enumerate(hashes):
            parent = None if index % self._chain == 0 else parent
            parent = cache.store(parent, (), value.to_bytes(8, "little"), pool.allocate(), value)
        engine.scheduler.drain_events()
        began = time.perf_counter()
        cache.snapshot()
        return time.perf_counter() - began


async def start_router() -> Any:
    while True:
        try:
            router = ray.remote(RouterCore).options(name=NAME, **OPTIONS).remote()
            break
        except ValueError:  # the name of the one before is not free yet
            await asyncio.sleep(0.01)
    await router.health.remote()
    return router


async def restart(router: Any, num_groups: int) -> tuple[Any, dict[str, float]]:
    killed = time.perf_counter()
    ray.kill(router)
    router = await start_router()
    began = time.perf_counter()
    figures = {"start": began - killed}
    slowest_s, number = 0.0, 0
    while "exact" not in figures:
        asked = time.perf_counter()
        query = RouteQuery(f"{began}-{number}", "m", pack_hashes(range(512)), 8192, 100)
        await router.route.remote(pack(RouteQueries("g", (query,), (f"{began}-{number - 1}",))))
        slowest_s = max(slowest_s, time.perf_counter() - asked)
        number += 1
        if "all groups" not in figures:
            packed, _ = await router.registry.remote()
            if len(unpack(packed, Registry).entries) == num_groups:
                figures["all groups"] = time.perf_counter() - began
        text = (await router.cluster_metrics.remote())["router"]
        if f'octavo_router_groups{{knowledge="exact",model="m"}} {float(num_groups)}' in text:
            figures["exact"] = time.perf_counter() - began
    return router, figures | {"query": slowest_s}


async def run(blocks: int, groups: int, chain: int, rounds: int) -> None:
    leaders = [ray.remote(Leader).options(**OPTIONS).remote(number, blocks, chain) for number in range(groups)]
    router = await start_router()
    walks = await asyncio.gather(*[leader.start.remote() for leader in leaders])
    await asyncio.sleep(1.0)
    print(
        f"{groups} groups of {blocks} blocks in chains of {chain}; {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    )
    print(f"walk        {max(walks):.3f} s")
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        router, figures = await restart(router, groups)
        for name, value in figures.items():
            found.setdefault(name, []).append(value)
        await asyncio.sleep(1.0)
    for name, values in found.items():
        print(f"{name:11s} {statistics.median(values):.3f} s (from {min(values):.3f} to {max(values):.3f})")
    per_100k = statistics.median(found["exact"]) / (blocks * groups / 100_000)
    print(f"exact after {per_100k:.3f} s for each 100,000 blocks")


@click.command()
@click.option("--blocks", default=200_000, show_default=True, help="of each group")
@click.option("--groups", default=2, show_default=True)
@click.option("--chain", default=32, show_default=True, help="blocks without a fork")
@click.option("--rounds", default=3, show_default=True)
def main(blocks: int, groups: int, chain: int, rounds: int) -> None:
    ray.init(num_cpus=2, logging_level="warning", log_to_driver=False)
    try:
        asyncio.run(run(blocks, groups, chain, rounds))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
