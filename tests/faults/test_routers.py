"""Two routers: each is killed, while requests stream and new ones come, and at last both at once."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx2 as httpx
import psutil
import pytest
from api_calls import COMPLETION, call
from openai import OpenAI
from serve_client import metric, wait_until_idle
from serve_process import ServeProcess, wait_until
from serve_stop import stop_and_look, wait_until_draining

RECOVERY_S = 60.0
BLOCK_SIZE = 16
SESSIONS = tuple(f"session {number}" for number in range(4))
PROMPT = "The keeper of the lighthouse wrote down the weather of every day. " * 8
EXACT = re.compile(r'^octavo_router_groups\{router="(\d)",.*knowledge="exact".*\} 2\.0$', re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    reason: str
    found_prompt: bool
    """Nothing of the prompt was computed but its last blocks."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    process = ServeProcess("--num-routers", "2", "--replicas", "2")
    yield process
    process.stop()


@pytest.fixture
def client(server: ServeProcess) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(
    client: OpenAI, server: ServeProcess, session: str, max_tokens: int = 8, begun: threading.Semaphore | None = None
) -> Answer:
    """Stream an answer to the session's prompt; that it comes, and is whole, is the test. ``begun`` hears of its first
    chunk."""
    with client.completions.with_streaming_response.create(
        model=server.model,
        prompt=f"{session}: {PROMPT}",
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
        extra_headers={"x-octavo-session-id": session},
    ) as response:
        headers = response.headers
        chunks = iter(response.parse())
        usage = next(chunks).usage
        if begun is not None:
            begun.release()
        for chunk in chunks:
            usage = chunk.usage
    assert usage is not None
    assert usage.completion_tokens == max_tokens
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return Answer(headers["x-octavo-route-reason"], cached >= usage.prompt_tokens - 2 * BLOCK_SIZE)


def routers(server: ServeProcess) -> list[psutil.Process]:
    return server.processes("ray::RouterCore")


def wait_until_exact(server: ServeProcess) -> None:
    """Both routers know all that both groups hold."""
    wait_until(
        lambda: set(EXACT.findall(httpx.get(f"{server.url}/metrics", timeout=30).text)) == {"0", "1"},
        timeout_s=RECOVERY_S,
        what="two routers that know both groups",
    )


def ask_on(
    client: OpenAI, server: ServeProcess, session: str, ends: threading.Event, seen: threading.Semaphore
) -> list[Answer]:
    answers = []
    while not ends.is_set():
        answers.append(ask(client, server, session))
        seen.release()
    return answers


def test_a_router_is_killed_and_nobody_falls_back(client: OpenAI, server: ServeProcess) -> None:
    """One after the other, so that the gateway's own is among them. Long streams go on, every request finds a router,
    and both routers send sessions to where their prompts are."""
    wait_until_exact(server)
    assert not any(ask(client, server, session).found_prompt for session in SESSIONS)
    wait_until_idle(server)
    for number in range(2):
        wait_until_exact(server)
        before = routers(server)
        assert len(before) == 2
        ends, seen = threading.Event(), threading.Semaphore(0)
        with ThreadPoolExecutor(6) as threads:
            long = [threads.submit(ask, client, server, session, 100) for session in SESSIONS[:2]]
            short = [threads.submit(ask_on, client, server, session, ends, seen) for session in SESSIONS]
            try:
                for _ in range(8):
                    assert seen.acquire(timeout=60)
                before[number].kill()
                for _ in range(16):
                    assert seen.acquire(timeout=60)
            finally:
                ends.set()
            answers = [answer for future in short for answer in future.result(60)]
            for future in long:
                future.result(60)
        wait_until(
            lambda before=before: len(set(routers(server)) - set(before)) == 1,
            timeout_s=RECOVERY_S,
            what="a router in the place of the killed one",
        )
        assert "router_away" not in {answer.reason for answer in answers}
        assert metric(server, "octavo_gateway_fallback_routes_total") == 0
        wait_until_exact(server)
        wait_until_idle(server)
        assert all(ask(client, server, session).found_prompt for session in SESSIONS)


def test_both_routers_are_killed_and_requests_are_served_all_the_same(client: OpenAI, server: ServeProcess) -> None:
    wait_until_exact(server)
    before = routers(server)
    for router in before:
        router.kill()
    for session in SESSIONS:
        ask(client, server, session)
    wait_until(lambda: len(set(routers(server)) - set(before)) == 2, timeout_s=RECOVERY_S, what="two new routers")
    wait_until_exact(server)
    fallen_back = metric(server, "octavo_gateway_fallback_routes_total")
    assert ask(client, server, SESSIONS[0]).reason != "router_away"
    assert metric(server, "octavo_gateway_fallback_routes_total") == fallen_back


def test_the_routers_and_a_leader_die_at_once_and_no_stream_is_lost(client: OpenAI, server: ServeProcess) -> None:
    """Who streams from the dead group goes on at the other, which the gateway finds without a router."""
    wait_until_exact(server)
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(4) as threads:
        streams = [threads.submit(ask, client, server, session, 200, begun) for session in SESSIONS]
        for _ in SESSIONS:
            assert begun.acquire(timeout=30)
        for process in (server.workers()[0], *routers(server)):
            process.kill()
        for stream in streams:
            stream.result(120)
    wait_until_exact(server)  # a group in the place of the dead one too
    wait_until_idle(server)
    assert ask(client, server, SESSIONS[0]).reason != "router_away"


def test_a_second_signal_ends_at_once(server: ServeProcess) -> None:
    """Case BUG-110: the first one waits for a stream. The last test of the module's server."""
    body = {"prompt": "Without an end:", "max_tokens": 8_000, "ignore_eos": True}
    with ThreadPoolExecutor(1) as threads:
        stream = threads.submit(call, server, COMPLETION, body, stream=True)
        wait_until(lambda: metric(server, "octavo_num_requests_running") == 1, timeout_s=30, what="it runs")

        def again() -> None:
            wait_until_draining(server)
            assert not stream.done()
            server.process.send_signal(signal.SIGTERM)

        stop_and_look(server, signal.SIGTERM, again, expected_code=128 + signal.SIGTERM)
        with pytest.raises(httpx.TransportError):
            stream.result(30)
