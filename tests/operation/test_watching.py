"""What an operator sees of a cluster with two ranks: one request's way in logs and spans, a profile, and top."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from serve_process import ServeProcess, wait_until
from span_collector import SpanCollector, attributes, span_collector

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"x-request-id": "seen-everywhere", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
FLAGS = ("--replicas", "1", "--tensor-parallel-size", "2", "--log-format", "json", "--log-level", "debug")

LOG_LINE = re.compile(r'\{"time": .*\}$')
"""Behind the name of a process, as Ray shows its output."""


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanCollector]:
    with span_collector() as server:
        yield server


@pytest.fixture(scope="module")
def server(collector: SpanCollector) -> Iterator[ServeProcess]:
    server = ServeProcess(*FLAGS, "--otlp-traces-endpoint", collector.url, "--vllm-metric-names")
    yield server
    server.stop()


def complete(server: ServeProcess, num_tokens: int) -> Any:
    body = {"model": server.model, "prompt": "Once upon a time", "max_tokens": num_tokens, "temperature": 0}
    url = f"{server.url}/v1/completions"
    answer = httpx.post(url, json=body | {"ignore_eos": True}, headers=HEADERS, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def logged(server: ServeProcess) -> list[dict[str, Any]]:
    return [json.loads(found[0]) for line in server.lines if (found := LOG_LINE.search(line.rstrip()))]


def top(server: ServeProcess, *words: str) -> str:
    command = [sys.executable, "-m", "octavo.cluster", "top", server.url, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_request_is_seen_at_gateway_router_and_worker_group(server: ServeProcess, collector: SpanCollector) -> None:
    answer = complete(server, 8)
    request_id = f"{answer['id']}-0"

    def whose() -> set[str]:
        return {line["role"] for line in logged(server) if TRACE in json.dumps(line)}

    wait_until(lambda: whose() == {"gateway", "router", "worker"}, timeout_s=20, what=f"lines of all, but {whose()}")
    (line,) = [line for line in logged(server) if line.get("id") == answer["id"]]
    assert (line["request_id"], line["status"], line["output_tokens"]) == ("seen-everywhere", 200, 8)
    assert "Once upon" not in json.dumps(logged(server))
    of_worker = next(line for line in logged(server) if line.get("client_request_id") == "seen-everywhere")
    assert (of_worker["request_id"], of_worker["rank"]) == (request_id, 0)

    wait_until(lambda: len(collector.spans) >= 5, timeout_s=30, what="spans")
    spans = {span.name: span for span in collector.spans if span.trace_id.hex() == TRACE}
    assert {"route", "queue", "prefill", "decode"} < spans.keys()
    assert attributes(spans["decode"])["octavo.output_tokens"] == 8


def test_a_profile_has_the_same_steps_of_both_ranks_and_changes_nothing(server: ServeProcess) -> None:
    alone = complete(server, 60)["choices"][0]["text"]
    with ThreadPoolExecutor(1) as threads:
        beside = threads.submit(lambda: [complete(server, 60) for _ in range(4)])
        told = top(server, "--profile", "4")
        assert {answer["choices"][0]["text"] for answer in beside.result()} == {alone}
    paths = [Path(path) for path in re.findall(r"rank \d+ +(\S+)", told)]
    assert len(paths) == 2
    wait_until(lambda: all(path.exists() for path in paths), timeout_s=20, what="both traces")
    assert len({steps_in(path) for path in paths}) == 1
    for path in paths:
        path.unlink()


def steps_in(trace: Path) -> tuple[str, ...]:
    names = {event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    steps = sorted(name for name in names if name.startswith("octavo step"))
    assert len(steps) == 4
    return tuple(steps)


def test_top_and_metrics_know_every_rank(server: ServeProcess) -> None:
    def ranks() -> list[str]:
        (group,) = json.loads(top(server, "--once", "--json", "--interval", "0.2"))["groups"]
        return [rank["rank"] for rank in group["ranks"]]

    wait_until(lambda: ranks() == ["0", "1"], timeout_s=20, what="both ranks")
    assert server.samples("vllm:num_requests_running")
    assert server.samples("vllm:e2e_request_latency_seconds_count")
