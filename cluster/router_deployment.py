"""Router: the deployments whose replicas each own one router's actor. They die together, and Serve starts
a new replica. (Ray could restart the actor alone; callers would then wait for it, when they had better ask another.)"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..router.actor import RouterCore
from ..router.config import RouterConfig
from ..router.tenants import TenantLimits
from .config import DEFAULT_PRIORITY_AGING_S, ServeConfig
from .plan import NAMESPACE, ClusterPlan, compile_cache, router_names
from .serve_ports import keep_calls_on_the_node

START_TIMEOUT_S = 30.0
HEALTH_TIMEOUT_S = 5.0
NAME_FREE_PAUSE_S = 0.05

logger = logging.getLogger("ray.serve")


class Router:
    """A call through Serve costs several times one on an actor, so gateways and leaders call the actor."""

    async def __init__(self, plan: ClusterPlan, index: int) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        keep_calls_on_the_node()
        names = router_names(serve.get_replica_context().app_name, plan.config.num_routers)
        self._name = names[index]
        self._compile_cache = str(compile_cache(plan.config.cache_dir))
        is_alone = len(names) == 1
        self._settings: dict[str, Any] = {
            "config": router_config(plan.config),
            "name": None if is_alone else str(index),
            "logs": (plan.config.log_level, plan.config.log_format),
            "find_peers": [functools.partial(ray.get_actor, name, NAMESPACE) for name in names if name != self._name],
        }
        with contextlib.suppress(ValueError):  # one that a replica killed a moment ago has left behind
            ray.kill(ray.get_actor(self._name, NAMESPACE))
        self._core = await self._create()
        await asyncio.wait_for(self._core.health.remote(), START_TIMEOUT_S)
        self._watcher = asyncio.create_task(self._watch())

    async def _create(self) -> Any:
        """Beside this replica: what books nothing would be put on the head, with which all routers would go.

        The name of an actor that was killed for good is free after a moment.
        """
        node = ray.get_runtime_context().get_node_id()
        end = asyncio.get_running_loop().time() + START_TIMEOUT_S
        options = {
            "name": self._name,
            "namespace": NAMESPACE,
            "num_cpus": 0,
            "max_concurrency": 10_000,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            "runtime_env": {"env_vars": {"NUMBA_CACHE_DIR": self._compile_cache}},
        }
        while True:
            try:
                return ray.remote(RouterCore).options(**options).remote(**self._settings)
            except ValueError:
                if asyncio.get_running_loop().time() > end:
                    raise
                await asyncio.sleep(NAME_FREE_PAUSE_S)

    async def _watch(self) -> None:
        """The actor's end is the replica's: sooner than Serve would find out."""
        try:
            await self._core.watch.remote()
        except RayError as error:
            logger.error("%s died: %s", self._name, type(error).__name__)
            os._exit(1)

    async def check_health(self) -> None:
        await asyncio.wait_for(self._core.health.remote(), HEALTH_TIMEOUT_S)


def router_config(config: ServeConfig) -> RouterConfig:
    """What the routers are told. Who waits there takes turns as in the groups' queues."""
    limits = {name: TenantLimits(**settings.model_dump()) for name, settings in config.tenants.items()}
    aging_s = config.priority_aging_s or DEFAULT_PRIORITY_AGING_S
    return RouterConfig(
        policy=config.routing_policy,
        max_index_bytes=int(config.router_index_bytes),
        max_queued_requests=config.num_queued_in_router,
        tenants=limits,
        knows_tenants=config.scheduling_policy == "fair" or bool(limits),
        priority_aging_s=0.0 if config.scheduling_policy == "fcfs" else aging_s,
        shares=config.num_routers > 1,
    )
