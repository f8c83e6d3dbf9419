"""A server is told to stop while it has work: that is finished, and everybody else is told so."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
from api_calls import COMPLETION, Answer, call
from serve_client import metric
from serve_process import ServeProcess, wait_until
from serve_stop import stop_and_look, wait_until_draining

STREAMS = 8
TALE: dict[str, Any] = {"max_tokens": 250, "ignore_eos": True, "temperature": 0}


def tell(server: ServeProcess, number: int) -> Answer:
    return call(server, COMPLETION, {"prompt": f"Tale {number}:"} | TALE, stream=True)


def test_case_bug_110_streams_are_finished_and_new_requests_are_told_to_go_elsewhere() -> None:
    """Eight when SIGTERM comes. Until the last of them ends the gateway is alive, not ready, and answers 503."""
    server = ServeProcess("--replicas", "1")
    try:
        with ThreadPoolExecutor(STREAMS) as threads:
            streams = [threads.submit(tell, server, number) for number in range(STREAMS)]
            wait_until(
                lambda: metric(server, "octavo_num_requests_running") == STREAMS, timeout_s=30, what="all running"
            )

            def ask_others() -> None:
                wait_until_draining(server)
                ready = httpx.get(f"{server.url}/ready", timeout=30)
                assert (ready.status_code, ready.json()["ready"]) == (503, False)
                for path in ("/health", "/metrics", "/v1/models"):
                    assert httpx.get(f"{server.url}{path}", timeout=30).status_code == 200, path
                for stream in (False, True):
                    refused = call(server, COMPLETION, {"prompt": "New"}, stream=stream)
                    assert (refused.status, (refused.error or {})["code"]) == (503, "service_unavailable")
                    assert int(refused.headers["retry-after"]) >= 1
                assert not all(stream.done() for stream in streams), "nothing was left to wait for"

            stop_and_look(server, signal.SIGTERM, ask_others)
            answers = [stream.result(30) for stream in streams]
        assert {(answer.is_done, answer.error, answer.finish_reason) for answer in answers} == {(True, None, "length")}
        assert {(answer.usage or {})["completion_tokens"] for answer in answers} == {TALE["max_tokens"]}
    finally:
        server.stop()
