"""The order in which an application stops, as its routers and leaders see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import RayActorError

from octavo.cluster import stopping


class Actor:
    """Answers from ``answers``; an exception is raised where the answer is fetched, as Ray does."""

    def __init__(self, name: str, calls: list[str], answers: dict[str, Callable[..., Any]]) -> None:
        self._name, self._calls, self._answers = name, calls, answers

    def __getattr__(self, method: str) -> Any:
        return type("Method", (), {"remote": lambda _, *args: (self, method, args)})()

    def answer(self, method: str, args: tuple[Any, ...]) -> Any:
        self._calls.append(f"{self._name}.{method}")
        return self._answers.get(method, lambda *_: None)(*args)


class Cluster:
    """Two routers that know one leader, and how many requests are under way each time that they are asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *under_way: int) -> None:
        self.calls: list[str] = []
        self.under_way = list(under_way)
        leader = Actor("leader", self.calls, {"retire": lambda limit_s: self.under_way.clear()})
        answers = {"num_under_way": self._count, "registry": lambda: (b"", [leader])}
        self.routers = {f"octavo:router:{index}": Actor(f"router {index}", self.calls, answers) for index in range(2)}
        monkeypatch.setattr(stopping.ray, "get_actor", self._find)
        monkeypatch.setattr(stopping.ray, "get", lambda call, timeout: call[0].answer(*call[1:]))
        monkeypatch.setattr(stopping, "POLL_S", 0.001)

    def _count(self) -> int:
        return self.under_way.pop(0) if len(self.under_way) > 1 else sum(self.under_way)

    def _find(self, name: str, _: str) -> Actor:
        if name not in self.routers:
            raise ValueError(name)
        return self.routers[name]


def dead() -> None:
    raise RayActorError


def test_nothing_is_ended_that_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 2, 2, 1, 2, 0)
    stopping.finish_requests("octavo", 2, 60.0)
    assert cluster.calls[:2] == ["router 0.drain", "router 1.drain"]
    assert set(cluster.calls[2:]) == {"router 0.num_under_way", "router 1.num_under_way"}
    assert cluster.under_way == [0]


def test_what_has_no_more_time_finds_no_other_group_when_its_own_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 1)
    stopping.finish_requests("octavo", 2, 0.01)
    kinds = list(dict.fromkeys(call.split(".")[1] for call in cluster.calls))
    assert kinds == ["drain", "num_under_way", "end", "registry", "retire"]
    assert cluster.calls.count("leader.retire") == 1


def test_one_router_is_enough_and_without_any_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 1, 0)
    cluster.routers.pop("octavo:router:0")
    stopping.finish_requests("octavo", 2, 60.0)
    assert cluster.under_way == [0]
    cluster = Cluster(monkeypatch, 1)
    for router in cluster.routers.values():
        router._answers = dict.fromkeys(("drain", "num_under_way"), dead)
    stopping.finish_requests("octavo", 2, 60.0)
    cluster.routers.clear()
    stopping.finish_requests("octavo", 2, 60.0)
