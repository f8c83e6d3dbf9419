"""Looks at a cluster's nodes while worker groups wait for their place, and says what is asked and what is there."""

from __future__ import annotations

from collections.abc import Callable

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group_table

from ..worker.errors import ConfigurationError
from .demands import model_demand, most_demanded
from .placement import Demand, Node, bundles_by_node, refusal, supply
from .plan import ClusterPlan, ServePlan

FIRST_REPORT_S = 10.0
REPORT_PERIOD_S = 30.0


def demand_of(plan: ServePlan) -> Demand:
    return model_demand(plan.config, plan.device)


def nodes() -> list[Node]:
    """The living nodes of the cluster."""
    available = available_resources_per_node()
    return [
        Node(node["NodeManagerAddress"], node["Resources"], available.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


def check_placement(plan: ClusterPlan, note: Callable[[str], None]) -> None:
    """Raises ConfigurationError when the groups can never have their place. A cluster that was joined may grow; there
    it is only said."""
    there = nodes()
    reason = refusal([demand_of(model) for model in plan.models], there) or _refusal_of_more(plan, there)
    if reason is None:
        return
    if plan.config.address is None:
        raise ConfigurationError(reason)
    note(f"waiting for the cluster to grow: {reason}")


def _refusal_of_more(plan: ClusterPlan, there: list[Node]) -> str | None:
    return refusal(most_demanded(plan.config, plan.device), there)


class PlacementWatch:
    """Says every now and then what groups wait for, as long as some do. ``look`` is called again and again."""

    def __init__(self, plan: ClusterPlan, note: Callable[[str], None]) -> None:
        self._plan = plan
        self._note = note
        self._due_s = FIRST_REPORT_S

    def look(self, waited_s: float) -> None:
        """``waited_s``: since the groups were asked for."""
        if waited_s < self._due_s:
            return
        self._due_s = waited_s + REPORT_PERIOD_S
        if waiting := self.waiting():
            self._note(f"{waiting} after {waited_s:.0f} s\n" + "\n".join(self._account()))

    def waiting(self) -> str:
        """How many groups have no place yet; empty when all have one."""
        mark = f"{self._plan.config.app_name}#WorkerGroup-"
        pending = [
            group for group in placement_group_table().values() if group["state"] == "PENDING" and mark in group["name"]
        ]
        return f"{len(pending)} of {self._plan.num_groups} worker groups wait for a place" if pending else ""

    def reason(self) -> str:
        """Why groups are not ready, as far as that is a matter of their place."""
        waiting = self.waiting()
        return "; ".join([waiting, *self._account()]) if waiting else "they are still loading"

    def _account(self) -> list[str]:
        return supply([demand_of(model) for model in self._plan.models], nodes())


def rank_bundles(group: PlacementGroup) -> list[int]:
    """The bundle of each rank of a group whose placement group is there."""
    node_of_bundle = placement_group_table(group)["bundles_to_node_id"]
    return bundles_by_node({int(index): node for index, node in node_of_bundle.items()})
