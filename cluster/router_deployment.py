"""Router: the deployment whose replica owns the router's actor; Serve restarts it, the actor dies with it."""

from __future__ import annotations

import asyncio
import contextlib

import ray
from ray import serve

from ..router.actor import RouterCore
from .plan import NAMESPACE, router_name

START_TIMEOUT_S = 30.0
HEALTH_TIMEOUT_S = 5.0


class Router:
    """A call through Serve costs several times one on an actor, so gateways and leaders call the actor."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        name = router_name(serve.get_replica_context().app_name)
        with contextlib.suppress(ValueError):  # one that a replica killed a moment ago has left behind
            ray.kill(ray.get_actor(name, NAMESPACE))
        self._core = await self._create(name)
        await asyncio.wait_for(self._core.health.remote(), START_TIMEOUT_S)

    async def _create(self, name: str) -> ray.actor.ActorHandle:
        """The name of a killed actor is free after a moment."""
        end = asyncio.get_running_loop().time() + START_TIMEOUT_S
        options = {"name": name, "namespace": NAMESPACE, "num_cpus": 0, "max_concurrency": 10_000}
        while True:
            try:
                return ray.remote(RouterCore).options(**options).remote()
            except ValueError:
                if asyncio.get_running_loop().time() > end:
                    raise
                await asyncio.sleep(0.1)

    async def check_health(self) -> None:
        await asyncio.wait_for(self._core.health.remote(), HEALTH_TIMEOUT_S)
