"""Fencing: the processes of a worker group that is given up are ended, and seen to be gone, on whatever node they run.

Only then its devices may be used again. Ray alone does not give that: it asks a process to end, and one that is stopped
or hangs in a driver is left for five seconds, or for ever when it is Ray itself that is gone from the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..worker.lifeline import STACKS_SIGNAL

PATIENCE_S = 10.0
"""One attempt to end the processes of a node waits so long for them to be gone."""
STACKS_S = 0.3
"""What a process gets to write its stacks."""
LOOK_PAUSE_S = 0.02
RETRY_PAUSE_S = 0.5
NODE_TIMEOUT_S = 20.0
"""A node that does not carry out an attempt for so long is asked again, unless it has left the cluster."""

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Where a rank runs."""

    rank: int
    node_id: str
    """Ray's, hexadecimal."""
    pid: int
    created_s: float
    """Start of the process, seconds since the epoch; tells it from a later one with its number."""


def end_processes(processes: Sequence[RankProcess], with_stacks: bool, patience_s: float = PATIENCE_S) -> list[int]:
    """SIGKILL for those of this machine, and wait until they are gone; the ranks of those that are not.

    ``with_stacks``: those that still live write their stacks to their logs before.
    """
    living = [process for process in processes if _lives(process)]
    if with_stacks and living:
        for process in living:
            _signal(process, STACKS_SIGNAL)
        time.sleep(STACKS_S)
    for process in living:
        _signal(process, signal.SIGKILL)
    end = time.monotonic() + patience_s
    while (living := [process for process in living if _lives(process)]) and time.monotonic() < end:
        time.sleep(LOOK_PAUSE_S)
    return [process.rank for process in living]


async def fence(name: str, processes: Sequence[RankProcess], *, with_stacks: bool = False) -> None:
    """End the processes of the worker group ``name``. Returns when none is left, however long that takes: whoever waits
    holds the group's place, so that nothing else is put on its devices."""
    nodes: dict[str, list[RankProcess]] = {}
    for process in processes:
        nodes.setdefault(process.node_id, []).append(process)
    await asyncio.gather(*[_fence_node(name, node_id, those, with_stacks) for node_id, those in nodes.items()])


async def _fence_node(name: str, node_id: str, processes: list[RankProcess], with_stacks: bool) -> None:
    while True:
        try:
            left = await asyncio.wait_for(_end_on(node_id, processes, with_stacks), NODE_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            if not await asyncio.to_thread(_is_in_cluster, node_id):
                return  # with its Ray the ranks are gone too, see ``die_with_parent``
            logger.warning("%s: node %s has not ended its ranks yet: %s", name, node_id, type(error).__name__)
            await asyncio.sleep(RETRY_PAUSE_S)
            continue
        if not left:
            return
        logger.error("%s: ranks %s on node %s cannot be killed; their devices stay taken", name, left, node_id)


async def _end_on(node_id: str, processes: list[RankProcess], with_stacks: bool) -> list[int]:
    if node_id == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(end_processes, processes, with_stacks)
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task: Any = ray.remote(end_processes).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    return list(await task.remote(processes, with_stacks))


def _is_in_cluster(node_id: str) -> bool:
    return any(node["Alive"] and node["NodeID"] == node_id for node in ray.nodes())


def _lives(process: RankProcess) -> bool:
    """One that is dead and not yet reaped holds no device any more."""
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(process.pid)
        return found.create_time() == process.created_s and found.status() not in _ENDED
    return False


_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _signal(process: RankProcess, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
