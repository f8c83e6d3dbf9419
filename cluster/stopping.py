"""The order in which an application stops: nothing new, then the end of what is under way, then its processes.

Serve takes away an application's routes as soon as it is to be deleted, also while its streams still run: clients would
be told 404, which means something else, and a probe that a process is dead which is busy finishing. So what is under
way is waited for before that, with gateways that answer.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import ray
from ray.exceptions import RayError

from .plan import NAMESPACE, router_names

CALL_TIMEOUT_S = 5.0
POLL_S = 0.1
GOODBYE_S = 5.0
"""For the error events of streams that had no more time."""


def finish_requests(app_name: str, num_routers: int, limit_s: float) -> None:
    """Refuse new requests and return when all others have ended; those that have not within ``limit_s`` are ended with
    an error. Without a router nothing can be said to anybody, and it returns at once."""
    routers = [router for name in router_names(app_name, num_routers) if (router := _actor(name)) is not None]
    _call(routers, "drain")
    if not _wait_until_idle(routers, limit_s):
        _call(routers, "end")
        _retire_leaders(routers)
        _wait_until_idle(routers, GOODBYE_S)


def _wait_until_idle(routers: list[Any], limit_s: float) -> bool:
    """Whether it became so in time. Each router knows what the others have decided."""
    end = time.monotonic() + limit_s
    while max(_call(routers, "num_under_way"), default=0) > 0:
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True


def _retire_leaders(routers: list[Any]) -> None:
    """They end with what they run."""
    leaders = {leader for _, leaders in _call(routers, "registry") for leader in leaders}
    _call(list(leaders), "retire", 0.0)


def _call(actors: list[Any], method: str, *args: Any) -> list[Any]:
    """The answers of those that answer."""
    answers = []
    for call in [getattr(actor, method).remote(*args) for actor in actors]:
        with contextlib.suppress(RayError):
            answers.append(ray.get(call, timeout=CALL_TIMEOUT_S))
    return answers


def _actor(name: str) -> Any | None:
    with contextlib.suppress(ValueError):
        return ray.get_actor(name, NAMESPACE)
    return None
