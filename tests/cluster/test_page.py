"""The live page: its files need no key and nothing from elsewhere; what it shows is gathered when a page asks."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_model import one_model
from scripted_cluster import Cluster

from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.model_metrics import ModelsMetrics
from octavo.cluster.api.service import ServedModel
from octavo.cluster.api.text.processor import TextProcessor
from octavo.cluster.http_config import HttpConfig
from octavo.cluster.page.decisions import MOST_CANDIDATES, MOST_DECISIONS
from octavo.cluster.page.files import FOLDER, PAGE_PATHS
from octavo.cluster.page.history import MOST_PAUSE_S, MOST_POINTS, WINDOW_S, History
from octavo.cluster.page.live import AGE_S, MOST_POOLS, LiveView
from octavo.cluster.page.pace import Pace
from octavo.cluster.watch.top.samples import Samples
from octavo.worker.block_pool import BlockStates
from octavo.worker.errors import Unavailable
from octavo.worker.pool_state import PoolCopy, PoolState, pool_state

FILES = sorted(path.name for path in FOLDER.iterdir())

CANDIDATE = {
    "group": "group-1",
    "generation": 5,
    "knowledge": "exact",
    "has_room": True,
    "num_sequences": 2,
    "cached_tokens": 32,
    "expected_ttft_s": 0.1,
    "cost": {"total_s": 0.2},
}
DECISION = {
    "request_id": "chatcmpl-1-0",
    "model": "smollm2",
    "reason": "prefix",
    "detail": "",
    "made_at_s": 12.0,
    "queued_s": 0.0,
    "expected_wait_s": 0.0,
    "num_prompt_tokens": 40,
    "group": "group-1",
    "expected_cached_tokens": 32,
    "actual_cached_tokens": None,
    "expected_ttft_s": 0.1,
    "actual_ttft_s": None,
    "num_candidates": 9,
    "candidates": [CANDIDATE] * 9,
    "age_s": 1.5,
    "router": "0",
}


def pool(letters: int = 3) -> PoolState:
    return pool_state(PoolCopy(BlockStates([1] * letters, bytes(letters), []), 16, 1, 0, 8, ()))


def metrics_at(num_tokens: int, num_hits: int = 0) -> str:
    return (
        f'octavo_generation_tokens_total{{gateway="g",model_name="m"}} {num_tokens}.0\n'
        f'octavo_prefix_cache_queries_total{{group="group-1",model_name="m"}} {num_tokens * 2}.0\n'
        f'octavo_prefix_cache_hits_total{{group="group-1",model_name="m"}} {num_hits}.0\n'
        'octavo_kv_cache_blocks{group="group-1",model_name="m"} 3.0\n'
    )


class Bench:
    """A view of a scripted service, on a clock of the test's."""

    def __init__(self, service: Any) -> None:
        self.service = service
        self.now = 100.0
        self.num_gathered = 0
        self.live = LiveView(self, ModelsMetrics(["m"], "g"), clock=lambda: self.now)  # type: ignore[arg-type]

    async def metrics_text(self) -> str:
        self.num_gathered += 1
        return metrics_at(100 * self.num_gathered, 50 * self.num_gathered)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)

    async def view(self, since: float = 0.0) -> dict[str, Any]:
        return dict(httpx2.Response(200, content=await self.live.view(since)).json())


@pytest.fixture
def bench(service: Any) -> Bench:
    return Bench(service)


@pytest.fixture
async def guarded(service: Any, text: TextProcessor, info: ServedModel) -> AsyncIterator[httpx2.AsyncClient]:
    """A server that asks for a key."""
    app = build_app(service, one_model(text, info), http=HttpConfig(api_key=("good",)))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://octavo") as client:
        yield client


# ---- the files ----


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in FILES)])
async def test_every_file_is_there_without_a_key_and_allows_nothing_from_elsewhere(
    guarded: httpx2.AsyncClient, path: str
) -> None:
    answer = await guarded.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert not re.search(r"https?:|unsafe|\*|data:", policy)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert path in PAGE_PATHS


@pytest.mark.parametrize("path", ["/page/live", "/page/none.js", "/page/../live.py", "/page/%2e%2e/live.py", "/page"])
async def test_nothing_else_is_open(guarded: httpx2.AsyncClient, path: str) -> None:
    assert (await guarded.get(path)).status_code == 401


async def test_what_is_not_there_is_not_found(client: httpx2.AsyncClient) -> None:
    for path in ("/page/none.js", "/page/%2e%2e/live.py"):
        assert (await client.get(path)).status_code == 404


async def test_a_file_that_is_known_is_not_sent_again(client: httpx2.AsyncClient) -> None:
    first = await client.get("/page/app.js")
    again = await client.get("/page/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert "javascript" in first.headers["content-type"]


@pytest.mark.parametrize("name", FILES)
def test_a_file_names_only_files_that_are_there_and_nothing_on_another_server(name: str) -> None:
    text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
    assert "://" not in text
    named = re.findall(r'(?:from|import\() ?"\./([^"]+)"', text) + re.findall(r'(?:src|href)="page/([^"]+)"', text)
    assert {target for target in named if not (FOLDER / target).is_file()} == set()


def test_no_file_makes_markup_of_text() -> None:
    for script in FOLDER.glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", script.read_text())


def test_the_files_are_part_of_the_package() -> None:
    settings = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"octavo.cluster.page" = ["static/*"]' in settings


# ---- what it shows ----


async def test_it_shows_pools_decisions_and_numbers(client: httpx2.AsyncClient, service: Any) -> None:
    service.pool_states = {"group-1": pool(), "group-2": None}
    service.decisions = [DECISION]
    service.cluster_metrics = metrics_at(100)
    view = (await client.get("/page/live")).json()
    first, second = view["groups"]
    assert (first["pool"]["pages"], first["numbers"]["num_blocks"]) == ("3w", 3)
    assert (second["group"], second["pool"], second["numbers"]) == ("group-2", None, None)
    assert view["decisions"][0]["reason"] == "prefix"
    assert view["models"][0]["model"] == "smollm2"
    assert view["points"] == []


async def test_nothing_that_a_prompt_says_is_in_it(client: httpx2.AsyncClient, service: Any) -> None:
    service.decisions = [DECISION | {"tenant": "acme", "prompt": "a secret"}]
    body = (await client.get("/page/live")).text
    assert "acme" not in body
    assert "secret" not in body


async def test_its_size_is_bounded(client: httpx2.AsyncClient, service: Any) -> None:
    service.pool_states = {f"group-{number:03}": pool() for number in range(MOST_POOLS + 9)}
    service.decisions = [DECISION] * (MOST_DECISIONS + 9)
    view = (await client.get("/page/live")).json()
    assert len(view["groups"]) == MOST_POOLS
    assert len(view["decisions"]) == MOST_DECISIONS
    assert len(view["decisions"][0]["candidates"]) == MOST_CANDIDATES


async def test_groups_beyond_those_that_are_drawn_are_counted(bench: Bench) -> None:
    bench.service.pool_states = {}
    assert (await bench.view())["num_not_drawn"] == 1


async def test_without_a_router_the_pools_are_shown_all_the_same(client: httpx2.AsyncClient, service: Any) -> None:
    service.pool_states = {"group-1": pool()}
    service.decisions = Unavailable("the router does not answer at present")
    view = (await client.get("/page/live")).json()
    assert view["decisions"] is None
    assert view["groups"][0]["pool"]["num_blocks"] == 3


@pytest.mark.parametrize("since", ["x", "nan", "inf", ""])
async def test_a_wrong_time_is_refused_by_name(client: httpx2.AsyncClient, since: str) -> None:
    answer = await client.get("/page/live", params={"since": since})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "since"


# ---- what it costs ----


async def test_nothing_is_gathered_before_a_page_asks_and_once_for_all_that_do(bench: Bench) -> None:
    assert bench.num_gathered == 0
    await asyncio.gather(*(bench.view() for _ in range(50)))
    assert bench.num_gathered == 1
    bench.now += AGE_S / 2
    await bench.view()
    assert bench.num_gathered == 1
    bench.now += AGE_S
    await bench.view()
    assert bench.num_gathered == 2


async def test_the_curves_go_on_where_a_page_has_left_off(bench: Bench) -> None:
    views = []
    for _ in range(4):
        views.append(await bench.view())
        bench.now += 1.0
    assert [len(view["points"]) for view in views] == [0, 1, 2, 3]
    at, *_, generated, _, hit_rate = views[1]["points"][0]
    assert (generated, hit_rate) == (100.0, 0.25)
    assert [point[0] for point in (await bench.view(at))["points"]] == [
        point[0] for point in (await bench.view())["points"] if point[0] > at
    ]


def test_a_point_is_of_the_last_seconds_and_a_pause_is_not_counted() -> None:
    history = History()
    for second in range(20):
        history.add(Samples(metrics_at(second * 10)), float(second), 1000.0 + second)
    history.add(Samples(metrics_at(1000)), 20.0, 1020.0)
    assert history.since(1019.5)[0].generated_tokens_per_s == (1000 - 150) / WINDOW_S
    pause_end = 21.0 + MOST_PAUSE_S
    assert history.add(Samples(metrics_at(9000)), pause_end, 2000.0) is None
    assert history.since(1020.0) == []


def test_a_long_look_keeps_a_bounded_past() -> None:
    history = History()
    for second in range(2 * MOST_POINTS):
        history.add(Samples(metrics_at(second)), float(second), float(second))
    assert len(history.since(0.0)) == MOST_POINTS


@given(st.integers(1, 400), st.integers(2, 5))
def test_however_many_pages_are_open_they_ask_so_often_together(num_pages: int, num_rounds: int) -> None:
    pace, period_s, gap_s = Pace(1.0, 0.05), 1.0, 0.05
    due = [0.0] * num_pages
    asked = []
    for _ in range(num_pages * num_rounds):
        now = min(due)
        asked.append(now)
        wait_s = pace.next_s(now)
        assert wait_s >= period_s - 1e-9
        due[due.index(now)] = now + wait_s
    later = asked[num_pages:]
    assert all(second - first >= gap_s - 1e-9 for first, second in itertools.pairwise(later))


def test_few_pages_need_not_wait_longer_than_the_period() -> None:
    pace = Pace(1.0, 0.05)
    assert [pace.next_s(now) for now in (0.0, 0.5, 1.2, 1.5)] == pytest.approx([1.0, 1.0, 1.0, 1.0])


# ---- asking the leaders ----


async def test_a_leader_that_does_not_answer_keeps_no_other_from_being_shown() -> None:
    cluster = Cluster()
    await cluster.service.groups.refresh()
    cluster.a.pool = pool()
    assert await cluster.service.pools(9) == {"a": pool(), "b": None}
    assert list(await cluster.service.pools(1)) == ["a"]
