"""Waits for nodes before an application is planned.

KubeRay deploys a Serve config as soon as there is a head, which holds no ranks; the workers join a little later. What
is planned depends on them: the device, and how many ranks share a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from ..worker.errors import ConfigurationError
from .config import ServeConfig
from .placement import Demand, Node, num_fitting, rank_resources, refusal, supply
from .placement_watch import REPORT_PERIOD_S, nodes

LOOK_S = 0.5

GATHER_S = 60.0
"""How long the other nodes may take when those that are there can hold one group: some may come on demand only."""


def wait_for_nodes(
    config: ServeConfig,
    note: Callable[[str], None],
    *,
    look: Callable[[], Sequence[Node]] = nodes,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when the cluster can hold all worker groups, or has been able to hold one of each model for 60 s.

    Says every 30 s what is asked and what is there. Raises ConfigurationError when no group has a place within
    ``config.startup_timeout_s``.
    """
    begin_s = clock()
    give_up_s, report_s = begin_s + config.startup_timeout_s, begin_s + REPORT_PERIOD_S
    can_begin = False
    while not _hold_all(demands := _demands(config, found := look()), found):
        now_s = clock()
        if not can_begin and _hold_some(demands, found):
            can_begin, give_up_s = True, now_s + GATHER_S
        if now_s >= give_up_s:
            if can_begin:
                return
            raise ConfigurationError(f"--startup-timeout-s: {refusal(demands, found)}")
        if now_s >= report_s:
            report_s = now_s + REPORT_PERIOD_S
            note("waiting for nodes\n" + "\n".join(supply(demands, found)))
        sleep(LOOK_S)


def _hold_all(demands: Sequence[Demand], found: Sequence[Node]) -> bool:
    return refusal(demands, found) is None


def _hold_some(demands: Sequence[Demand], found: Sequence[Node]) -> bool:
    """One group of each model."""
    return all(num_fitting(demand, [node.total for node in found]) > 0 for demand in demands)


def num_rank_hosts(device: Literal["cpu", "cuda"], found: Sequence[Node]) -> int:
    """Nodes that can hold a rank; at least 1. The head of a Kubernetes cluster holds none."""
    rank = Demand(1, 1, rank_resources(device), "node")
    return max(1, sum(num_fitting(rank, [node.total]) for node in found))


def _demands(config: ServeConfig, found: Sequence[Node]) -> list[Demand]:
    """With ``--device auto`` it is GPUs if there are any now."""
    has_gpus = any(node.total.get("GPU", 0.0) >= 1.0 for node in found)
    device: Literal["cpu", "cuda"] = (
        "cuda" if config.device == "cuda" or (config.device == "auto" and has_gpus) else "cpu"
    )
    return [
        Demand(model.replicas or 1, model.tensor_parallel_size, rank_resources(device), model.placement)
        for model in (model.for_device(device) for model in config.each_model())
    ]
