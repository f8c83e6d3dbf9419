"""Where ranks may lie, and what is said when they cannot."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cluster import placement_watch
from octavo.cluster.config import ServeConfig
from octavo.cluster.demands import demands_of, most_demanded
from octavo.cluster.placement import Demand, Node, Placement, bundles_by_node, num_fitting, refusal, supply
from octavo.cluster.plan import ClusterPlan, ServePlan
from octavo.worker.errors import ConfigurationError

GPU = {"GPU": 1.0, "CPU": 1.0}


def node(name: str, gpus: int, cpus: int = 16, free: int | None = None) -> Node:
    free_gpus = gpus if free is None else free
    return Node(name, {"GPU": gpus, "CPU": cpus}, {"GPU": free_gpus, "CPU": cpus})


def demand(groups: int, size: int, placement: Placement = "node") -> Demand:
    return Demand(groups, size, GPU, placement)


@pytest.mark.parametrize(
    ("groups", "size", "placement", "gpus", "fits"),
    [
        (2, 4, "node", (4, 4), 2),
        (3, 4, "node", (4, 4), 2),
        (1, 8, "node", (4, 4), 0),
        (1, 8, "nodes", (4, 4), 1),
        (2, 3, "node", (5, 5), 2),
        (3, 3, "nodes", (5, 5), 3),
        (1, 2, "spread", (8,), 0),
        (3, 2, "spread", (3, 1, 2), 3),
        (2, 3, "spread", (8, 8, 1), 1),
        (4, 1, "spread", (3, 0), 3),
    ],
)
def test_how_many_groups_nodes_can_hold(
    groups: int, size: int, placement: Placement, gpus: tuple[int, ...], fits: int
) -> None:
    assert num_fitting(demand(groups, size, placement), [{"GPU": each, "CPU": 64} for each in gpus]) == fits


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 3))
def test_spread_groups_fit_exactly_when_some_layout_exists(gpus: list[int], groups: int, size: int) -> None:
    def can_place(left: tuple[int, ...], to_place: int) -> bool:
        return to_place == 0 or any(
            can_place(tuple(free - (at in chosen) for at, free in enumerate(left)), to_place - 1)
            for chosen in itertools.combinations([at for at, free in enumerate(left) if free], size)
        )

    expected = max(count for count in range(groups + 1) if can_place(tuple(gpus), count))
    assert num_fitting(demand(groups, size, "spread"), [{"GPU": each, "CPU": 64} for each in gpus]) == expected


def test_what_can_never_fit_is_refused_with_what_each_node_has_and_a_way_out() -> None:
    nodes = [node("10.0.0.1", 4), node("10.0.0.2", 4)]
    assert refusal([demand(2, 4)], nodes) is None
    too_many = refusal([demand(3, 4)], nodes)
    assert too_many == (
        "3 worker groups of 4 ranks of 1 GPU, 1 CPU, within one node do not fit: 10.0.0.1 has 4 GPU, 16 CPU; 10.0.0.2"
        " has 4 GPU, 16 CPU; at most --replicas 2, or add nodes"
    )
    assert "--placement nodes" in (refusal([demand(1, 8)], nodes) or "")
    assert "lower --tensor-parallel-size, or add nodes" in (refusal([demand(1, 16)], nodes) or "")


def test_models_that_fit_alone_can_be_too_much_together() -> None:
    nodes = [node("10.0.0.1", 4)]
    assert refusal([demand(1, 4), demand(1, 2)], nodes) is not None
    assert refusal([demand(1, 2), demand(1, 2)], nodes) is None


def test_demand_stands_against_supply_node_by_node() -> None:
    lines = supply([demand(1, 2)], [node("10.0.0.1", 4, free=1), node("10.0.0.2", 0)])
    assert lines == [
        "wanted: 1 worker group of 2 ranks of 1 GPU, 1 CPU, within one node",
        "  10.0.0.1: 1 GPU, 16 CPU free of 4 GPU, 16 CPU",
        "  10.0.0.2: 0 GPU, 16 CPU free of 0 GPU, 16 CPU",
    ]


def test_ranks_are_numbered_by_node_and_the_leader_is_where_the_replica_is() -> None:
    assert bundles_by_node({0: "b", 1: "a", 2: "b", 3: "a"}) == [0, 2, 1, 3]
    assert bundles_by_node({0: "a"}) == [0]


def test_no_bundle_asks_for_a_certain_node() -> None:
    assert {name for bundle in demand(1, 3).bundles for name in bundle} == {"GPU", "CPU"}


# ---- while groups wait ----


class Cluster:
    """What Ray says of its nodes and placement groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *states: str) -> None:
        self.states = list(states)
        monkeypatch.setattr(placement_watch, "nodes", lambda: [node("10.0.0.1", 4, free=1)])
        monkeypatch.setattr(placement_watch, "placement_group_table", self.table)

    def table(self) -> dict[str, dict[str, str]]:
        groups = {str(at): {"name": "octavo#WorkerGroup-0#x", "state": state} for at, state in enumerate(self.states)}
        return groups | {"other": {"name": "other#WorkerGroup-0#x", "state": "PENDING"}}


def plan(**values: Any) -> ClusterPlan:
    config = ServeConfig.parse({"tensor_parallel_size": 4, "replicas": 2, "max_num_batched_tokens": 512, **values})
    model = ServePlan(config, "cuda", None, "m", b"", 1)
    return ClusterPlan(config, (model,), b"")


def test_groups_that_wait_are_said_with_demand_and_supply_every_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, notes = Cluster(monkeypatch, "PENDING", "CREATED"), []
    watch = placement_watch.PlacementWatch(plan(), notes.append)
    watch.look(1.0)
    assert notes == []
    watch.look(placement_watch.FIRST_REPORT_S)
    watch.look(placement_watch.FIRST_REPORT_S + 1.0)
    assert len(notes) == 1
    assert "1 of 2 worker groups wait for a place after 10 s" in notes[0]
    assert "10.0.0.1: 1 GPU, 16 CPU free of 4 GPU, 16 CPU" in notes[0]
    assert watch.reason() == notes[0].replace(" after 10 s\n", "; ").replace("\n", "; ")
    cluster.states[0] = "CREATED"
    watch.look(1000.0)
    assert len(notes) == 1
    assert watch.reason() == "they are still loading"


def test_a_cluster_of_our_own_is_refused_at_once_and_one_that_was_joined_may_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[str] = []
    Cluster(monkeypatch)
    with pytest.raises(ConfigurationError, match="at most --replicas 1"):
        placement_watch.check_placement(plan(), notes.append)
    assert notes == []
    placement_watch.check_placement(plan(address="10.0.0.1:6379"), notes.append)
    assert "waiting for the cluster to grow" in notes[0]


def test_all_groups_that_may_be_added_must_fit_too() -> None:
    nodes = [node("10.0.0.1", 4)]
    config = ServeConfig.parse({"tensor_parallel_size": 2, "replicas": 2, "max_replicas": 3})
    assert refusal(demands_of(config, "cuda"), nodes) is None
    assert (refusal(most_demanded(config, "cuda"), nodes) or "").endswith("at most --max-replicas 2, or add nodes")
