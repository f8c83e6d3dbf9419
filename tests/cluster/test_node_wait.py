"""A Serve config may be deployed before the workers have joined: what is planned waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from octavo.cluster.config import ServeConfig
from octavo.cluster.node_wait import GATHER_S, num_rank_hosts, wait_for_nodes
from octavo.cluster.placement import Node
from octavo.worker.errors import ConfigurationError

HEAD = Node("head", {"CPU": 0.0}, {})


def gpu_node(name: str, gpus: float = 1.0) -> Node:
    resources = {"CPU": 16.0, "GPU": gpus}
    return Node(name, resources, resources)


class Waiting:
    """A cluster whose nodes are those that ``nodes_at`` says for a time, and how long it was waited for."""

    def __init__(self, nodes_at: Callable[[float], Sequence[Node]], **args: Any) -> None:
        self.now_s = 0.0
        self.notes: list[str] = []
        config = ServeConfig.parse({"device": "cuda", "startup_timeout_s": 300, **args})
        wait_for_nodes(
            config, self.notes.append, look=lambda: nodes_at(self.now_s), clock=lambda: self.now_s, sleep=self._sleep
        )

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_cluster_that_is_there_is_not_waited_for() -> None:
    assert Waiting(lambda _: [HEAD, gpu_node("a"), gpu_node("b")], replicas=2).now_s == 0


def test_workers_that_join_after_the_head_are_waited_for() -> None:
    waiting = Waiting(lambda now: [HEAD] if now < 45 else [HEAD, gpu_node("a"), gpu_node("b")], replicas=2)
    assert waiting.now_s == 45
    assert "head: 0 GPU, 0 CPU free" in waiting.notes[0]


def test_the_other_nodes_are_waited_for_no_longer_than_a_minute() -> None:
    """They may come only when groups ask for them."""
    waiting = Waiting(lambda now: [HEAD] if now < 45 else [HEAD, gpu_node("a")], replicas=2)
    assert waiting.now_s == 45 + GATHER_S


def test_without_a_place_for_one_group_it_ends_with_what_is_there() -> None:
    with pytest.raises(ConfigurationError, match=r"--startup-timeout-s: 1 worker group .* a has 1 GPU, 16 CPU"):
        Waiting(lambda _: [HEAD, gpu_node("a")], tensor_parallel_size=2)


def test_a_group_over_several_nodes_waits_for_all_of_them() -> None:
    nodes = [HEAD, gpu_node("a", 8), gpu_node("b", 8)]
    waiting = Waiting(lambda now: nodes[: 2 + (now >= 20)], tensor_parallel_size=16, placement="nodes")
    assert waiting.now_s == 20


def test_every_model_needs_its_place() -> None:
    models = [{"model": "a/b", "tensor_parallel_size": 1}, {"model": "c/d", "tensor_parallel_size": 2}]
    waiting = Waiting(lambda now: [HEAD, gpu_node("a", 1 if now < 10 else 3)], models=models)
    assert waiting.now_s == 10


def test_ranks_share_the_machines_that_can_hold_them() -> None:
    nodes = [HEAD, gpu_node("a"), Node("cpus", {"CPU": 8.0}, {})]
    assert (num_rank_hosts("cuda", nodes), num_rank_hosts("cpu", nodes)) == (1, 2)
    assert num_rank_hosts("cuda", [HEAD]) == 1
