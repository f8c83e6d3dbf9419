"""Where requests go and why, in a real cluster: wishes, explanations, the router's queue, recorded traces."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from serve_process import ServeProcess, wait_until

SHORT = {"max_tokens": 2, "temperature": 0}


def complete(server: ServeProcess, prompt: str, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"model": server.model, "prompt": prompt} | SHORT | fields
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)


def explained(server: ServeProcess, **parameters: Any) -> list[dict[str, Any]]:
    answer = httpx.get(f"{server.url}/debug/route", params=parameters, timeout=10)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["decisions"])


@pytest.fixture
def groups(cluster: ServeProcess) -> list[str]:
    complete(cluster, "Once")
    newest = explained(cluster, limit=1)[0]
    return sorted(candidate["group"] for candidate in newest["candidates"])


def test_requests_go_where_they_are_pinned_and_not_where_they_must_not(
    cluster: ServeProcess, groups: list[str]
) -> None:
    """A preference is worth the prompt's prefill: the prompt is long, or the last report of a load outweighs it."""
    for group in groups:
        assert complete(cluster, "A", {"x-octavo-group": group}).headers["x-octavo-group"] == group
        away = complete(cluster, "B", {"x-octavo-exclude-groups": group}).headers["x-octavo-group"]
        assert away in groups
        assert away != group
        prefers = complete(cluster, f"{group}, " * 30, {"x-octavo-prefer-groups": group})
        assert prefers.headers["x-octavo-group"] == group


def test_a_pin_that_nobody_has_and_a_header_that_nobody_knows_are_named(cluster: ServeProcess) -> None:
    unknown = complete(cluster, "A", {"x-octavo-group": "group-of-nobody"})
    assert (unknown.status_code, unknown.headers["x-octavo-route-reason"]) == (503, "not_allowed")
    assert "group-of-nobody" in unknown.json()["error"]["message"]
    wrong = complete(cluster, "A", {"x-octavo-prefer-groups": ""})
    assert wrong.status_code == 400
    assert "x-octavo-prefer-groups" in wrong.json()["error"]["message"]


def test_a_session_stays_together(cluster: ServeProcess) -> None:
    """The prompts have nothing in common, and are long enough for the preference to be worth something."""
    prompts = [f"{number}, " * 60 for number in range(6)]
    answers = [complete(cluster, prompt, {"x-octavo-session-id": "s"}) for prompt in prompts]
    assert len({answer.headers["x-octavo-group"] for answer in answers}) == 1


def test_a_decision_can_be_looked_up_by_the_answers_id(cluster: ServeProcess) -> None:
    prompt = "All happy families are alike; every unhappy family is unhappy in its own way. " * 4
    answers = [complete(cluster, prompt) for _ in range(2)]
    identity = answers[1].json()["id"]
    wait_until(
        lambda: explained(cluster, request_id=identity)[0]["actual_ttft_s"] is not None,
        timeout_s=10,
        what="the group's word of the prefill",
    )
    (decision,) = explained(cluster, request_id=identity)
    assert decision["group"] == answers[1].headers["x-octavo-group"]
    assert decision["expected_cached_tokens"] == decision["actual_cached_tokens"] > 32
    assert decision["reason"] in ("prefix", "preferred", "even")
    assert set(decision["candidates"][0]["cost"]) >= {"wait_s", "prefill_s", "imposed_s", "preference_s", "total_s"}
    metrics = httpx.get(f"{cluster.url}/metrics").text
    for name in ("ttft_error_seconds", "imbalance", "index_bytes", "event_lag_seconds", "decisions", "event_gaps"):
        assert f"octavo_router_{name}" in metrics


# ---- the router's queue ----

TENANTS = {"small": {"max_running_requests": 1, "max_queued_requests": 0}}


@pytest.fixture(scope="module")
def queueing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """One group of two places; the router lets two requests wait."""
    trace = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    server = ServeProcess(
        *("--replicas", "1", "--max-num-seqs", "2", "--router-max-queued-requests", "2"),
        *("--tenants", json.dumps(TENANTS), "--record-trace", str(trace)),
    )
    server.trace = trace  # type: ignore[attr-defined]
    yield server
    server.stop()


def busy(server: ServeProcess, threads: ThreadPoolExecutor, count: int, **fields: Any) -> list[Any]:
    """Requests that run, or wait in the group, for some seconds; they are there when this returns."""
    fields = {"max_tokens": 120, "ignore_eos": True} | fields
    begun = len(explained(server, limit=256))
    calls = [threads.submit(complete, server, f"Number {number} of the list is", **fields) for number in range(count)]
    wait_until(lambda: len(explained(server, limit=256)) >= begun + count, timeout_s=20, what=f"{count} decisions")
    return calls


def test_what_finds_no_room_waits_and_what_finds_the_queue_full_is_refused(queueing: ServeProcess) -> None:
    with ThreadPoolExecutor(8) as threads:
        running = busy(queueing, threads, 3)  # two places, and one that waits at the group so that it never idles
        waiting = busy(queueing, threads, 2, max_tokens=2)
        refused = complete(queueing, "One too many")
        assert (refused.status_code, refused.headers["x-octavo-route-reason"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert "--router-max-queued-requests is 2" in refused.json()["error"]["message"]
        late = complete(queueing, "No time", timeout=0.001)
        assert late.status_code in (429, 408)
        answers = [call.result() for call in (*running, *waiting)]
    assert [answer.status_code for answer in answers] == [200] * 5
    assert all(float(answer.headers["x-octavo-queue-ms"]) > 0 for answer in answers[3:])
    assert "x-octavo-queue-ms" not in answers[0].headers


def test_a_tenant_has_no_more_than_its_limit_and_others_do_not_notice(queueing: ServeProcess) -> None:
    with ThreadPoolExecutor(2) as threads:
        (running,) = busy(queueing, threads, 1, user="small")
        refused = complete(queueing, "Again", user="small")
        assert (refused.status_code, refused.headers["x-octavo-route-reason"]) == (429, "tenant_limit")
        assert "max_running_requests is 1" in refused.json()["error"]["message"]
        assert complete(queueing, "Somebody else", user="other").status_code == 200
        assert running.result().status_code == 200
    assert complete(queueing, "Later", user="small").status_code == 200


def test_what_was_recorded_can_be_simulated(queueing: ServeProcess) -> None:
    trace: Path = queueing.trace  # type: ignore[attr-defined]
    for number in range(3):
        complete(queueing, f"The same beginning, long enough for a block or two of tokens. Then number {number}")
    num_lines = len(trace.read_text().splitlines())
    wait_until(lambda: len(trace.read_text().splitlines()) >= num_lines, timeout_s=5, what="lines")
    time.sleep(1.5)  # one more second's lines
    command = [sys.executable, "-m", "octavo.cluster", "simulate", "--trace", str(trace), "--groups", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["policies"]["cost"]["num_requests"] >= 9
    assert 0.0 < figures["infinite_cache_hit_rate"] < 1.0
    assert "beginning" not in trace.read_text()
