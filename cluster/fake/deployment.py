"""FakeGroups: the deployment in the place of WorkerGroup where a model has a fake engine. One replica has all groups of
the model, in a few processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from ..environment import ray_tls
from ..plan import ServePlan, router_names
from .host import FakeHost

GROUPS_PER_HOST = 50
"""Groups of a process: at least so many as one core can drive."""
STOP_S = 5.0

logger = logging.getLogger("ray.serve")


class FakeGroups:
    """The replica."""

    async def __init__(self, plan: ServePlan) -> None:  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        self._limit_s = plan.config.shutdown_timeout_s
        routers = router_names(context.app_name, plan.config.num_routers)
        prefix = f"group-{context.replica_id.unique_id}"
        names = [f"{prefix}-{number}" for number in range(plan.config.replicas or 1)]
        shares = [names[start : start + GROUPS_PER_HOST] for start in range(0, len(names), GROUPS_PER_HOST)]
        self._hosts = [_host(plan, share, routers) for share in shares]
        try:
            tls, limit_s = ray_tls(), plan.config.startup_timeout_s
            await asyncio.wait_for(asyncio.gather(*[host.start.remote(tls) for host in self._hosts]), limit_s)
        except BaseException:
            self._kill()
            raise
        self._watchers = [asyncio.create_task(self._watch(host)) for host in self._hosts]

    async def check_health(self) -> None:
        """The watchers look after the hosts; that it answers is enough."""

    async def __del__(self) -> None:
        """Serve stops this replica: finish what is under way."""
        for watcher in getattr(self, "_watchers", ()):
            watcher.cancel()
        with contextlib.suppress(RayError, TimeoutError):
            drained = asyncio.gather(*[host.drain.remote(self._limit_s) for host in self._hosts])
            await asyncio.wait_for(drained, self._limit_s + STOP_S)
        self._kill()

    async def _watch(self, host: Any) -> None:
        """A host's end is the replica's; Serve starts another one."""
        try:
            await host.watch.remote()
        except RayError as error:
            logger.error("fake worker groups end: %s", type(error).__name__)
        self._kill()
        os._exit(1)

    def _kill(self) -> None:
        for host in self._hosts:
            ray.kill(host)


def _host(plan: ServePlan, groups: list[str], routers: tuple[str, ...]) -> Any:
    return ray.remote(FakeHost).options(num_cpus=0, max_concurrency=10_000).remote(plan, groups, routers)
