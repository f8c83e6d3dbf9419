"""WorkerGroup: the deployment whose replica holds one copy of the model, over the workers of its placement group.

The replica creates the workers, brings them up together, and watches them: when one dies, hangs or fails, the group is
of no use; the replica ends the others, sees them gone, and ends itself, and Serve starts a new group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..kernels.cpu_environment import cpu_environment
from ..worker.actor import Worker
from . import group_updates, ledgers
from .autoscaling import FREE_SHARE, TTFT
from .environment import ray_tls
from .fencing import STACKS_S, RankProcess, fence
from .placement_watch import rank_bundles
from .plan import NAMESPACE, ServePlan, compile_cache, router_names
from .rank_watch import RankEnd, until_over
from .serve_ports import keep_calls_on_the_node
from .watch.ranks import share_rank_metrics

OUTLOOK_TIMEOUT_S = 2.0

logger = logging.getLogger("ray.serve")


class WorkerGroup:
    """One replica."""

    async def __init__(self, plan: ServePlan) -> None:  # type: ignore[misc]  # Serve awaits it
        keep_calls_on_the_node()
        context = serve.get_replica_context()
        self._dead: str | None = None
        self._app_name, self._deployment = context.app_name, context.deployment
        self.name = f"group-{context.replica_id.unique_id}"
        await asyncio.to_thread(group_updates.publish, self._app_name, self._deployment, plan)
        self._plan = await asyncio.to_thread(group_updates.current, self._app_name, self._deployment, plan)
        self._workers = self._create_workers()
        self._processes: list[RankProcess] = []
        try:
            await asyncio.wait_for(self._bring_up(), plan.config.startup_timeout_s)
        except BaseException:
            self._kill_workers()
            await fence(self.name, self._processes)
            raise
        self._watchers = [asyncio.create_task(self._watch(worker, rank)) for rank, worker in enumerate(self._workers)]
        self._watchers.append(asyncio.create_task(share_rank_metrics(self._workers)))

    def _create_workers(self) -> list[Any]:
        routers = router_names(self._app_name, self._plan.config.num_routers)
        spec = self._plan.worker_spec(self.name, time.time_ns(), routers)
        placement_group = get_current_placement_group()
        return [
            ray.remote(Worker)
            .options(
                num_cpus=self._plan.rank_resources["CPU"],
                num_gpus=self._plan.rank_resources.get("GPU", 0.0),
                max_concurrency=10_000,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group, placement_group_bundle_index=bundle
                ),
                runtime_env={"env_vars": worker_environment(self._plan)},
            )
            .remote(spec, rank)
            for rank, bundle in enumerate(rank_bundles(placement_group))
        ]

    async def _bring_up(self) -> None:
        places = await asyncio.gather(*[worker.process.remote() for worker in self._workers])
        self._processes = [RankProcess(rank, *place) for rank, place in enumerate(places)]
        alone = len(self._workers) == 1
        host, port = ("127.0.0.1", 0) if alone else await self._workers[0].address.remote()
        loaded = await asyncio.gather(*[worker.load.remote(host, port) for worker in self._workers])
        for rank in loaded:
            logger.info("%s rank %d: %d KV blocks\n%s", self.name, rank["rank"], rank["num_blocks"], rank["ledger"])
        await asyncio.to_thread(ledgers.publish, self._app_name, self.name, loaded)
        await self._workers[0].lead.remote(ray_tls())

    async def _watch(self, worker: Any, rank: int) -> None:
        """Wait for the worker's end, which is the group's."""
        end = await until_over(worker, rank)
        is_told_to = rank > 0 and end.reason is None  # by the leader, which then ends too
        if self._dead is None and not is_told_to:
            await self._end(end)

    async def _end(self, end: RankEnd) -> None:
        """End everything at once: the graceful way would hold the placement group while a new group waits for it. The
        streams move as soon as the leader is gone; the placement is given up when all ranks are."""
        self._dead = end.reason or "it was asked to end"
        logger.log(logging.ERROR if end.reason else logging.INFO, "%s ends: %s", self.name, self._dead)
        if end.hangs:
            for worker in self._workers:
                worker.write_stacks.remote()
            await asyncio.sleep(STACKS_S)
        self._kill_workers()
        await fence(self.name, self._processes, with_stacks=end.hangs)
        os._exit(1 if end.reason else 0)

    def _kill_workers(self) -> None:
        for worker in self._workers:
            ray.kill(worker)

    async def check_health(self) -> None:
        """The watchers look after the ranks, and end this process when one is of no use; that it answers is enough."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For Serve's autoscaler: what the router expects for the model."""
        for name in router_names(self._app_name, self._plan.config.num_routers):
            with contextlib.suppress(RayError, ValueError, TimeoutError):
                router = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
                call = router.outlook.remote(self._plan.served_model_name)
                if (told := await asyncio.wait_for(call, OUTLOOK_TIMEOUT_S)) is not None:
                    return dict(zip((TTFT, FREE_SHARE), told, strict=True))
        return {}

    async def __del__(self) -> None:
        """Serve stops this replica: finish what is under way, then end the workers."""
        for watcher in getattr(self, "_watchers", ()):
            watcher.cancel()
        if getattr(self, "_watchers", None) and self._dead is None:
            try:
                limit_s = self._plan.config.shutdown_timeout_s
                await asyncio.wait_for(self._workers[0].drain.remote(limit_s), limit_s + 5.0)
            except (RayError, TimeoutError) as error:
                logger.warning("%s did not drain: %s", self.name, type(error).__name__)
            self._kill_workers()
            await fence(self.name, self._processes)
            await asyncio.to_thread(ledgers.withdraw, self._app_name, self.name)


def worker_environment(plan: ServePlan) -> dict[str, str]:
    """Environment variables of the workers' processes. Of this node: the one that the application is built on may have
    fewer processors, as the head of a Kubernetes cluster."""
    if plan.device == "cuda":
        return {}
    return cpu_environment(plan.num_threads_per_rank) | {"NUMBA_CACHE_DIR": str(compile_cache(plan.config.cache_dir))}
