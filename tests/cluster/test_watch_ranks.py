"""Metrics of ranks reach their leader; and top's numbers come from the routers where the API is out of reach."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from octavo.cluster.watch import ranks
from octavo.cluster.watch.top import ray_source
from octavo.cluster.watch.top.ray_source import RaySource
from octavo.cluster.watch.top.sources import NotWatched


class Rank:
    """A rank's actor. One that is gone answers nothing."""

    def __init__(self, text: str, *, is_gone: bool = False) -> None:
        self.told: list[dict[str, str]] = []
        self.is_gone = is_gone
        self.metrics = SimpleNamespace(remote=lambda: self._answer(text))
        self.take_rank_metrics = SimpleNamespace(remote=self._take)

    async def _answer(self, text: str) -> str:
        if self.is_gone:
            raise RayActorError
        return text

    async def _take(self, texts: dict[str, str]) -> None:
        await self._answer("")
        self.told.append(texts)


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[None]]:
    monkeypatch.setattr(ranks, "RANK_METRICS_PERIOD_S", 0.0)

    async def run(*workers: Rank) -> None:
        sharing = asyncio.create_task(ranks.share_rank_metrics(workers))
        async with asyncio.timeout(10):
            while not (workers[0].told or sharing.done()):
                await asyncio.sleep(0)
        sharing.cancel()

    return run


async def test_the_leader_is_told_what_the_other_ranks_say(share: Callable[..., Awaitable[None]]) -> None:
    leader = Rank("zero")
    await share(leader, Rank("one"), Rank("two", is_gone=True), Rank("three"))
    assert leader.told[0] == {"1": "one", "3": "three"}


async def test_it_ends_with_the_leader_and_where_there_are_no_others(share: Callable[..., Awaitable[None]]) -> None:
    await share(Rank("zero", is_gone=True), Rank("one"))
    await share(Rank("zero"))


def a_ray(actors: dict[str, Any]) -> Any:
    def get_actor(name: str, namespace: str) -> Any:
        if name not in actors:
            raise ValueError(name)
        return SimpleNamespace(cluster_metrics=SimpleNamespace(remote=lambda: actors[name]))

    return SimpleNamespace(get_actor=get_actor, get=lambda answer, timeout: answer)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RaySource]:
    def join(actors: dict[str, Any]) -> RaySource:
        monkeypatch.setattr(ray_source, "ray", a_ray(actors))
        return RaySource("127.0.0.1:6379", "octavo")

    return join


def test_every_router_that_answers_is_heard_and_others_only_once(joined: Callable[..., RaySource]) -> None:
    first = {"router": 'octavo_a{router="0"} 1.0\n', "group:a": "octavo_b 2.0\n"}
    third = {"router": 'octavo_a{router="2"} 3.0\n', "group:a": "octavo_b 2.0\n"}
    text = joined({"octavo:router:0": first, "octavo:router:2": third}).metrics()
    assert sorted(text.split("\n")) == ["", 'octavo_a{router="0"} 1.0', 'octavo_a{router="2"} 3.0', "octavo_b 2.0"]


def test_an_application_that_there_is_not_is_said(joined: Callable[..., RaySource]) -> None:
    with pytest.raises(NotWatched, match="--app-name"):
        joined({}).metrics()
