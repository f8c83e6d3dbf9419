"""Where the ranks of a worker group may lie: bundles of its placement group, and whether a cluster can hold them.

    bundle 0        rank 0, the leader, and the group's replica, which books next to nothing
    bundle 1 … t-1  a rank each

Ranks are numbered by node, so that neighbours in a collective share one as far as possible; rank 0 is on the replica's.
No resource of the kind ``node:ADDRESS`` is asked for: a group may come up again anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Placement = Literal["node", "nodes", "spread"]
Resources = Mapping[str, float]

STRATEGIES: Mapping[Placement, str] = {"node": "STRICT_PACK", "nodes": "PACK", "spread": "STRICT_SPREAD"}
"""Ray's names."""

SMALL = 2.0**-10
"""CPUs booked by processes that mostly wait: something, so that a bundle can hold them. A power of two: Ray cuts
amounts off after four digits, and 1 + 0.001 is a little less in binary, so that 1 would not fit beside 0.001."""

GATEWAY_RESOURCE = "octavo_gateway"
"""A launched cluster has it where its HAProxy is: that dials gateways of its own machine alone at the address that they
listen on."""

_ROUNDING = 1e-6


def rank_resources(device: Literal["cpu", "cuda"]) -> dict[str, float]:
    """What one rank books of its node."""
    return {"GPU": 1.0, "CPU": 1.0} if device == "cuda" else {"CPU": 1.0}


@dataclass(frozen=True, slots=True)
class Node:
    """What a node has, and what of it is not booked."""

    name: str
    total: Resources
    available: Resources = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Demand:
    """``num_groups`` worker groups of ``group_size`` ranks that ask for ``rank`` each."""

    num_groups: int
    group_size: int
    rank: Resources
    placement: Placement
    flag: str = "--replicas"
    """What says how many groups there are."""

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Of one group's placement group."""
        first = {name: amount + SMALL * (name == "CPU") for name, amount in self.rank.items()}
        return [first, *[dict(self.rank) for _ in range(self.group_size - 1)]]

    def __str__(self) -> str:
        groups = f"{self.num_groups} worker group{'s' * (self.num_groups > 1)}"
        ranks = f"{self.group_size} rank{'s' * (self.group_size > 1)} of {amounts(self.rank)}"
        where = {"node": "within one node", "nodes": "over any nodes", "spread": "each on a node of its own"}
        return f"{groups} of {ranks}" + (f", {where[self.placement]}" if self.group_size > 1 else "")


def num_fitting(demand: Demand, totals: Sequence[Resources]) -> int:
    """How many of the groups nodes with ``totals`` can hold at once, if they hold nothing else."""
    rank = demand.bundles[0] if demand.group_size == 1 else demand.rank
    if demand.placement == "node" or demand.group_size == 1:
        whole = {name: sum(bundle.get(name, 0.0) for bundle in demand.bundles) for name in demand.bundles[0]}
        return min(demand.num_groups, sum(_times(whole, total) for total in totals))
    slots = [_times(rank, total) for total in totals]
    if demand.placement == "nodes":
        return min(demand.num_groups, sum(slots) // demand.group_size)
    return max(
        groups
        for groups in range(demand.num_groups + 1)
        # Each node has at most one rank of a group; so many groups can be laid out exactly if there are enough slots.
        if sum(min(slot, groups) for slot in slots) >= groups * demand.group_size
    )


def refusal(demands: Sequence[Demand], nodes: Sequence[Node]) -> str | None:
    """Why ``nodes`` can never hold what is demanded, and what to do; None when that is not certain."""
    for demand in demands:
        fits = num_fitting(demand, [node.total for node in nodes])
        if fits < demand.num_groups:
            has = _listed(demand, nodes)
            return f"{demand} {_does(demand)} not fit: {has}; {_advice(demand, nodes, fits)}"
    return _joint_refusal(demands, nodes)


def _joint_refusal(demands: Sequence[Demand], nodes: Sequence[Node]) -> str | None:
    """Why the groups of several models that fit alone do not fit together."""
    for name in {name for demand in demands for name in demand.rank}:
        wanted = sum(demand.num_groups * sum(each.get(name, 0.0) for each in demand.bundles) for demand in demands)
        if wanted > sum(node.total.get(name, 0.0) for node in nodes) + _ROUNDING:
            groups = " and ".join(map(str, demands))
            flags = " or ".join(dict.fromkeys(demand.flag for demand in demands))
            return f"{groups} do not fit together: {_listed(demands[0], nodes)}; lower {flags}, or add nodes"
    return None


def _listed(demand: Demand, nodes: Sequence[Node]) -> str:
    return "; ".join(f"{node.name} has {amounts(node.total, demand.rank)}" for node in nodes) or "there is no node"


def _does(demand: Demand) -> str:
    return "do" if demand.num_groups > 1 else "does"


def _advice(demand: Demand, nodes: Sequence[Node], fits: int) -> str:
    if fits > 0:
        return f"at most {demand.flag} {fits}, or add nodes"
    elsewhere = Demand(1, demand.group_size, demand.rank, "nodes")
    if demand.placement != "nodes" and num_fitting(elsewhere, [node.total for node in nodes]):
        return "let a group's ranks lie on any nodes (--placement nodes), or lower --tensor-parallel-size"
    return "lower --tensor-parallel-size, or add nodes"


def supply(demands: Sequence[Demand], nodes: Sequence[Node]) -> list[str]:
    """Demand against supply: a line for what is asked, and one for each node."""
    lines = [f"wanted: {' and '.join(map(str, demands))}"]
    for node in nodes:
        free = amounts(node.available, demands[0].rank)
        lines.append(f"  {node.name}: {free} free of {amounts(node.total, demands[0].rank)}")
    return lines


def bundles_by_node(node_of_bundle: Mapping[int, str]) -> list[int]:
    """The bundle of each rank: rank 0 has bundle 0, then come those of the same node, then node after node."""
    order = {node_of_bundle[0]: -1}
    for bundle in sorted(node_of_bundle):
        order.setdefault(node_of_bundle[bundle], bundle)
    return sorted(node_of_bundle, key=lambda bundle: (order[node_of_bundle[bundle]], bundle))


def amounts(resources: Resources, asked: Resources | None = None) -> str:
    """``1 GPU, 8 CPU``; with ``asked`` those alone that are asked for, also when there are none."""
    names = sorted(resources if asked is None else asked, key=lambda name: (name != "GPU", name))
    return ", ".join(f"{math.floor(resources.get(name, 0.0) * 100 + _ROUNDING) / 100:g} {name}" for name in names)


def _times(need: Resources, total: Resources) -> int:
    """How often ``need`` is contained in ``total``."""
    return int(min(math.floor(total.get(name, 0.0) / amount + _ROUNDING) for name, amount in need.items() if amount))
