"""``octavo top``: what two looks at a cluster's metrics say, in a terminal and for scripts."""

from __future__ import annotations

import functools
import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from rich.console import Console

from octavo.cluster.cli import main
from octavo.cluster.watch.top.overview import overview
from octavo.cluster.watch.top.samples import Samples, Window
from octavo.cluster.watch.top.screen import screen

BOUNDS = (0.1, 0.5, 1.0, 5.0)

LOOKS = [
    """\
octavo_gateway_requests_in_flight{gateway="g",model_name="m"} 3.0
octavo_router_queued_requests{model="m"} 2.0
octavo_generation_tokens_total{gateway="g",model_name="m"} 100.0
octavo_router_decisions_total{model="m",reason="prefix"} 10.0
octavo_kv_cache_blocks{group="a",model_name="m"} 64.0
octavo_kv_cache_usage_perc{group="a",model_name="m"} 0.5
octavo_num_requests_running{group="a",model_name="m"} 4.0
octavo_router_group_knowledge{group="a",knowledge="exact",model="m"} 1.0
octavo_prefix_cache_queries_total{group="a",model_name="m"} 1000.0
octavo_prefix_cache_hits_total{group="a",model_name="m"} 100.0
octavo_process_threads{group="a",model_name="m",rank="0",role="worker"} 9.0
octavo_process_cpu_seconds_total{group="a",model_name="m",rank="0",role="worker"} 10.0
octavo_gpu_memory_used_bytes{group="a",model_name="m",rank="0"} 64424509440.0
octavo_gpu_memory_total_bytes{group="a",model_name="m",rank="0"} 85899345920.0
octavo_gpu_power_watts{group="a",model_name="m",rank="0"} 350.0
octavo_time_to_first_token_seconds_bucket{gateway="g",le="0.5",model_name="m"} 7.0
octavo_time_to_first_token_seconds_bucket{gateway="g",le="+Inf",model_name="m"} 7.0
"""
]
CHANGED = {
    'tokens_total{gateway="g",model_name="m"} 100.0': 'tokens_total{gateway="g",model_name="m"} 180.0',
    'hits_total{group="a",model_name="m"} 100.0': 'hits_total{group="a",model_name="m"} 250.0',
    "} 10.0": "} 14.0",
    "} 1000.0": "} 1200.0",
    "} 7.0": "} 9.0",
}
LOOKS.append(functools.reduce(lambda text, change: text.replace(*change), CHANGED.items(), LOOKS[0]))


def window(seconds: float = 2.0) -> Window:
    return Window(Samples(LOOKS[0]), Samples(LOOKS[1]), seconds)


def test_rates_and_shares_are_of_the_time_between_two_looks() -> None:
    view = overview(window(), 2.0)
    (model,), (group,) = view.models, view.groups
    assert (model.num_in_flight, model.num_queued, model.generated_tokens_per_s) == (3, 2, 40.0)
    assert view.decisions_per_s == {"prefix": 2.0}
    assert (group.knowledge, group.num_running, group.kv_usage, group.hit_rate) == ("exact", 4, 0.5, 0.75)
    (rank,) = group.ranks
    assert (rank.cpu_cores, rank.gpu_power_watts, rank.resident_bytes) == (2.0, 350.0, None)
    assert model.ttft.p50_s == 0.25, "two came below 0.5 s; of them one is taken to lie below the middle"
    assert model.itl.p50_s is None, "nothing came"


def test_a_counter_that_began_anew_counts_from_zero() -> None:
    before, now = Samples("octavo_a_total 100.0\n"), Samples("octavo_a_total 6.0\n")
    assert Window(before, now, 2.0).rate("octavo_a_total") == 3.0


@given(st.lists(st.floats(0.0, 4.9), min_size=1, max_size=40), st.floats(0.01, 0.99))
def test_a_quantile_lies_in_the_bucket_of_the_value_that_it_stands_for(values: list[float], share: float) -> None:
    registry = CollectorRegistry()
    histogram = Histogram("seconds", "Of something.", registry=registry, buckets=BOUNDS)
    before = Samples(generate_latest(registry).decode())
    for value in values:
        histogram.observe(value)
    found = Window(before, Samples(generate_latest(registry).decode()), 1.0).quantile("seconds", share)
    rank = share * len(values)
    exact = sorted(values)[min(int(rank) if rank % 1 else max(int(rank) - 1, 0), len(values) - 1)]
    low = max([0.0, *[bound for bound in BOUNDS if bound < exact]])
    high = min(bound for bound in BOUNDS if bound >= exact)
    assert found is not None
    assert low <= found <= high


def test_labels_with_quotes_and_commas_are_read() -> None:
    samples = Samples('octavo_a{model_name="a \\"b\\", {c}\\\\d",group="g"} 1.0\n')
    assert samples.value("octavo_a", model_name='a "b", {c}\\d', group="g") == 1.0


def test_the_screen_has_every_group_and_rank() -> None:
    for width in (80, 140):
        console = Console(file=io.StringIO(), width=width)
        console.print(screen(overview(window(), 2.0), "http://octavo", width))
        told = console.file.getvalue()  # type: ignore[attr-defined]
        for words in ("exact", "75%", "60.0 / 80 GiB", "350 W", "prefix 2.0", "250ms"):
            assert words in told, told
        assert "…" not in told
        assert ("e2e" in told) is (width == 140)


class Server(ThreadingHTTPServer):
    """A gateway that gives ``looks`` one after the other, to those who have the key."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.looks = list(LOOKS)
        self.key: str | None = None
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(200, self.server.looks.pop(0))

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self._answer(401, json.dumps({"error": {"message": "no"}}))
        elif "group=nosuch" in self.path:
            self._answer(400, json.dumps({"error": {"message": "There is no worker group 'nosuch'."}}))
        else:
            self._answer(200, json.dumps({"groups": {"a": {"steps": 5, "files": {"0": "/there/a-1-rank0.json.gz"}}}}))

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def top() -> Callable[..., Result]:
    return lambda *words: CliRunner().invoke(main, ["top", *words])


def test_one_view_for_scripts(server: Server, top: Callable[..., Result]) -> None:
    done = top(server.url, "--once", "--json", "--interval", "0.2")
    view = json.loads(done.stdout)
    assert done.exit_code == 0
    assert view["groups"][0]["hit_rate"] == pytest.approx(0.75)
    assert view["models"][0]["generated_tokens_per_s"] == pytest.approx(80 / view["seconds"])


def test_a_profile_says_where_the_traces_are(server: Server, top: Callable[..., Result]) -> None:
    server.key = "secret"
    done = top(server.url, "--profile", "5", "--group", "a", "--api-key", "secret")
    assert "rank 0  /there/a-1-rank0.json.gz" in done.stdout
    assert server.asked == ["/debug/profile?steps=5&group=a"]


def test_mistakes_are_one_line(server: Server, top: Callable[..., Result]) -> None:
    server.looks = ["up 1\n"]
    assert "is not Octavo's" in one_line(top(server.url, "--once"))
    assert "There is no worker group 'nosuch'." in one_line(top(server.url, "--profile", "5", "--group", "nosuch"))
    server.key = "secret"
    assert "asks for a key" in one_line(top(server.url, "--profile", "5"))
    assert "does not answer" in one_line(top("http://127.0.0.1:1", "--once"))
    assert "must be such as" in one_line(top("localhost:8000", "--once"))
    assert "--once" in one_line(top("--json"))
    assert "--profile" in one_line(top("--group", "a"))
    assert "leave out" in one_line(top("http://o", "--address", "auto"))


def one_line(done: Result) -> str:
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(("main top: error: ", "octavo top: error: "))
    return line
