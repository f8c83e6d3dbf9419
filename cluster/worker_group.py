"""WorkerGroup: the deployment whose replica holds one copy of the model, over the workers of its placement group.

The replica creates the workers, brings them up together, and watches them: when one dies, the group is of no use; the
replica ends the others and itself, and Serve starts a new group.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..worker.actor import Worker
from . import ledgers
from .plan import ServePlan, router_names

DRAIN_S = 30.0
"""A group that is stopped may take so long to finish what is under way."""

HEALTH_TIMEOUT_S = 10.0

logger = logging.getLogger("ray.serve")


class WorkerGroup:
    """One replica. ``environment`` is set in its workers' processes."""

    async def __init__(self, plan: ServePlan, environment: dict[str, str]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._plan = plan
        self._dead: str | None = None
        self._app_name = serve.get_replica_context().app_name
        self.name = f"group-{serve.get_replica_context().replica_id.unique_id}"
        self._workers = self._create_workers(environment)
        try:
            await asyncio.wait_for(self._bring_up(), plan.config.startup_timeout_s)
        except BaseException:
            self._kill_workers()
            raise
        self._watchers = [asyncio.create_task(self._watch(worker)) for worker in self._workers]

    def _create_workers(self, environment: dict[str, str]) -> list[Any]:
        routers = router_names(self._app_name, self._plan.config.num_routers)
        spec = self._plan.worker_spec(self.name, time.time_ns(), routers)
        return [
            ray.remote(Worker)
            .options(
                num_cpus=self._plan.rank_resources["CPU"],
                num_gpus=self._plan.rank_resources.get("GPU", 0.0),
                max_concurrency=10_000,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    get_current_placement_group(), placement_group_bundle_index=1 + rank
                ),
                runtime_env={"env_vars": environment},
            )
            .remote(spec, rank)
            for rank in range(spec.tensor_parallel_size)
        ]

    async def _bring_up(self) -> None:
        alone = len(self._workers) == 1
        host, port = ("127.0.0.1", 0) if alone else await self._workers[0].address.remote()
        loaded = await asyncio.gather(*[worker.load.remote(host, port) for worker in self._workers])
        for rank in loaded:
            logger.info("%s rank %d: %d KV blocks\n%s", self.name, rank["rank"], rank["num_blocks"], rank["ledger"])
        await asyncio.to_thread(ledgers.publish, self._app_name, self.name, loaded)
        await self._workers[0].lead.remote()

    async def _watch(self, worker: Any) -> None:
        """Wait for the worker's end, which is the group's."""
        try:
            await worker.watch.remote()
        except RayError as error:
            self._fail(str(error).strip().split("\n")[-1])

    def _fail(self, reason: str) -> None:
        """End everything at once: the graceful way would hold the placement group while a new group waits for it."""
        if self._dead is None:
            self._dead = reason
            logger.error("%s failed: %s", self.name, reason)
            self._kill_workers()
            os._exit(1)

    def _kill_workers(self) -> None:
        for worker in self._workers:
            ray.kill(worker)

    async def check_health(self) -> None:
        """All ranks answer, and the engine comes round. Raises otherwise."""
        await asyncio.wait_for(asyncio.gather(*[worker.health.remote() for worker in self._workers]), HEALTH_TIMEOUT_S)

    async def __del__(self) -> None:
        """Serve stops this replica: finish what is under way, then end the workers."""
        for watcher in getattr(self, "_watchers", ()):
            watcher.cancel()
        if getattr(self, "_watchers", None) and self._dead is None:
            try:
                await asyncio.wait_for(self._workers[0].drain.remote(DRAIN_S), DRAIN_S + 5.0)
            except (RayError, TimeoutError) as error:
                logger.warning("%s did not drain: %s", self.name, type(error).__name__)
            self._kill_workers()
            await asyncio.to_thread(ledgers.withdraw, self._app_name, self.name)
