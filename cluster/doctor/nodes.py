"""The facts of a running Ray cluster: each node is asked by a task that runs there and nowhere else."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ...worker.listen import listen_on
from ..config import ServeConfig
from ..demands import demands_of, most_demanded
from ..hosts.launch import said
from ..placement import STRATEGIES, Demand, num_fitting, refusal, supply
from ..placement_watch import nodes as placement_nodes
from ..placement_watch import rank_bundles
from .facts import Facts, Node, Reduction
from .gather import Question, gather
from .here import device_of, wanted_of
from .reduce import MEET_S, RankOrder, measured, reduce_rank

ANSWER_S = 90.0
PLACE_S = 15.0

_CLASS = re.compile(r"^(?:\w+\.)+\w+(?:Error|Exception): ")

_SEES_GPUS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""A task that books no GPU sees none without it."""


def cluster_facts(config: ServeConfig, reduce_s: float) -> Facts:
    """Of the cluster that this process is a driver of. ``reduce_s``: seconds for each group's all-reduce; 0: none."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    found, silent = _ask(config, alive)
    device = device_of(config, int(ray.cluster_resources().get("GPU", 0)))
    demands = demands_of(config, device)
    have = placement_nodes()
    reason = refusal(demands, have) or refusal(most_demanded(config, device), have)
    facts = Facts(found, wanted_of(config, demands), silent, placement_error=reason)
    if facts.placement_error is not None:
        return facts
    if any(num_fitting(demand, [node.available for node in have]) < demand.num_groups for demand in demands):
        return replace(facts, is_booked="; ".join(supply(demands, have)))
    return _with_reductions(facts, demands, device, reduce_s) if reduce_s > 0 else facts


def _ask(config: ServeConfig, alive: Sequence[Mapping[str, Any]]) -> tuple[tuple[Node, ...], dict[str, str]]:
    """What the nodes answer, the head first, and why some do not."""
    alive = sorted(alive, key=lambda node: "node:__internal_head__" not in node["Resources"])
    tasks = {node["NodeManagerAddress"]: _task(config, node, index == 0) for index, node in enumerate(alive)}
    ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=ANSWER_S)
    found, silent = [], {}
    for address, task in tasks.items():
        try:
            found.append(ray.get(task, timeout=0.1))
        except GetTimeoutError:
            silent[address] = f"no answer within {ANSWER_S:g} s"
        except RayError as error:
            silent[address] = str(error).strip().splitlines()[-1]
    return tuple(found), silent


def _task(config: ServeConfig, node: Mapping[str, Any], is_head: bool) -> Any:
    question = Question(said(config), node["NodeManagerAddress"], is_head=is_head, checks_port=False)
    return (
        ray.remote(max_calls=1)(gather)  # the process goes with it, and so does the GPU memory that it took
        .options(
            num_cpus=0,
            runtime_env={"env_vars": _SEES_GPUS},
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        .remote(question)
    )


class Reducer:
    """An actor: one rank of an all-reduce."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def address(self) -> tuple[str, int]:
        """Rank 0: where the ranks meet."""
        host = ray.util.get_node_ip_address()
        self._listener = listen_on(host)
        return host, self._listener.getsockname()[1]

    def run(self, order: RankOrder) -> tuple[str, int, float]:
        fd = None if self._listener is None else self._listener.detach()
        return reduce_rank(replace(order, listen_fd=fd))


def _with_reductions(facts: Facts, demands: Sequence[Demand], device: Literal["cpu", "cuda"], seconds: float) -> Facts:
    """All groups at once, as they would run."""
    pairs = [(demand, _create(demand)) for demand in demands for _ in range(demand.num_groups) if demand.group_size > 1]
    try:
        missing = [group for _, group in pairs if not group.wait(PLACE_S)]
        if missing:
            reason = f"{len(missing)} groups got no place in {PLACE_S:g} s"
            return replace(facts, is_booked="; ".join([reason, *supply(demands, placement_nodes())]))
        running = [_Running(index, demand, group) for index, (demand, group) in enumerate(pairs)]
        for each in running:
            each.begin(device, seconds)
        return replace(facts, reductions=tuple(each.end(seconds) for each in running))
    finally:
        for _, group in pairs:
            remove_placement_group(group)


def _create(demand: Demand) -> PlacementGroup:
    return placement_group(demand.bundles, strategy=STRATEGIES[demand.placement])


class _Running:
    """The all-reduce of one group under way."""

    def __init__(self, index: int, demand: Demand, group: PlacementGroup) -> None:
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        where = placement_group_table(group)["bundles_to_node_id"]
        bundles = rank_bundles(group)
        self._reduction = Reduction(index, tuple(addresses[where[bundle]] for bundle in bundles))
        self._ranks = [
            ray.remote(Reducer)
            .options(
                num_cpus=demand.rank["CPU"],
                num_gpus=demand.rank.get("GPU", 0.0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            )
            .remote()
            for bundle in bundles
        ]
        self._tasks: list[Any] = []
        self._error: str | None = None

    def begin(self, device: Literal["cpu", "cuda"], seconds: float) -> None:
        try:
            host, port = ray.get(self._ranks[0].address.remote(), timeout=MEET_S)
        except (RayError, TimeoutError) as error:
            self._error = _last_line(error)
            return
        orders = [RankOrder(host, port, rank, len(self._ranks), device, seconds) for rank in range(len(self._ranks))]
        self._tasks = [rank.run.remote(order) for rank, order in zip(self._ranks, orders, strict=True)]

    def end(self, seconds: float) -> Reduction:
        """Never raises for what the ranks could not do."""
        try:
            if self._error is not None:
                return replace(self._reduction, error=self._error)
            return measured(self._reduction, ray.get(self._tasks, timeout=MEET_S + 2 * seconds))
        except (RayError, TimeoutError) as error:
            return replace(self._reduction, error=_last_line(error))
        finally:
            for rank in self._ranks:
                ray.kill(rank)


def _last_line(error: BaseException) -> str:
    """Without the module and class of the exception that another process had."""
    lines = str(error).strip().splitlines()
    return _CLASS.sub("", lines[-1]) if lines else type(error).__name__
