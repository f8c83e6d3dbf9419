"""The facts of this machine, without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from ..config import ServeConfig
from ..demands import demands_of, most_demanded
from ..hosts.launch import said
from ..hosts.probe import source_address
from ..model_settings import DEFAULT_GPU_MEMORY_UTILIZATION
from ..placement import Demand, Node, refusal
from .facts import Facts, Reduction, Wanted
from .facts import Node as NodeFacts
from .gather import Question, gather
from .reduce import reduce_here


def device_of(config: ServeConfig, num_gpus: int) -> Literal["cpu", "cuda"]:
    """What the workers will compute on."""
    if config.device == "auto":
        return "cuda" if num_gpus else "cpu"
    return config.device


def wanted_of(config: ServeConfig, demands: list[Demand]) -> Wanted:
    utilizations = [model.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION for model in config.each_model()]
    return Wanted(
        device=config.device,
        tensor_parallel_size=max(demand.group_size for demand in demands),
        num_ranks=sum(demand.num_groups * demand.group_size for demand in demands),
        gpu_memory_utilization=max(utilizations),
        serves_in_cluster=config.address is not None,
    )


def facts_here(config: ServeConfig, reduce_s: float) -> Facts:
    """``reduce_s``: seconds for each group's all-reduce; 0: none."""
    address = source_address("192.0.2.1") or "127.0.0.1"
    node = gather(Question(said(config), address, is_head=True, checks_port=True))
    device = device_of(config, len(node.gpus))
    demands = demands_of(config, device)
    facts = Facts((node,), wanted_of(config, demands), placement_error=_refusal(node, config, device))
    if facts.placement_error is None and reduce_s > 0:
        return replace(facts, reductions=tuple(_reductions(demands, device, address, reduce_s)))
    return facts


def _refusal(node: NodeFacts, config: ServeConfig, device: Literal["cpu", "cuda"]) -> str | None:
    """Of CPUs ``octavo serve`` books as many as it needs; GPUs must be there."""
    if device == "cpu":
        return None
    num_gpus = float(min(len(node.gpus), node.num_torch_gpus) or len(node.gpus))
    there = [Node(node.address, {"GPU": num_gpus, "CPU": 2.0 * node.num_cpus + num_gpus})]
    return refusal(demands_of(config, device), there) or refusal(most_demanded(config, device), there)


def _reductions(demands: list[Demand], device: str, address: str, seconds: float) -> Iterator[Reduction]:
    """Group after group."""
    group, next_gpu = 0, 0
    for demand in demands:
        for _ in range(demand.num_groups):
            devices = ["cpu"] * demand.group_size
            if device == "cuda":
                devices = [f"cuda:{next_gpu + rank}" for rank in range(demand.group_size)]
            next_gpu += demand.group_size
            if demand.group_size > 1:
                yield reduce_here(group, devices, address, seconds)
            group += 1
