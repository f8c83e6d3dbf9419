"""Real kills: a worker process dies, idle, in the middle of streams and of beam searches; a rank of two dies; the
server is stopped in the middle of streams that do not end."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest
from api_calls import COMPLETION, call
from openai import OpenAI
from serve_client import Choices, wait_until_idle
from serve_process import ServeProcess, wait_until
from serve_stop import stop_and_look

STREAM = {"messages": [{"role": "user", "content": "Count from one upwards."}], "temperature": 0, "max_tokens": 160}
RECOVERY_S = 90.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    """Two groups of two ranks."""
    process = ServeProcess("--replicas", "2", "--tensor-parallel-size", "2", "--shutdown-timeout-s", "2")
    yield process
    process.stop()


@pytest.fixture
def client(server: ServeProcess) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def wait_for_groups(server: ServeProcess, count: int) -> None:
    def ready() -> bool:
        answer = httpx.get(f"{server.url}/ready", timeout=10)
        return answer.status_code == 200 and answer.json()["reason"].startswith(f"{count} ")

    wait_until(ready, timeout_s=RECOVERY_S, what=f"{count} worker groups ready")


def stream_text(client: OpenAI, model: str, on_chunk: Any = None) -> str:
    """That it is counted once and as a whole is a test of every stream."""
    text, usages = "", []
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
    for chunk in client.chat.completions.create(model=model, stream=True, **fields, **STREAM):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usages += [chunk.usage] if chunk.usage is not None else []
        if on_chunk is not None:
            on_chunk(text)
    assert [usage.completion_tokens for usage in usages] == [STREAM["max_tokens"]]
    return text


def test_an_idle_worker_is_killed_and_its_group_replaced(client: OpenAI, server: ServeProcess) -> None:
    wait_for_groups(server, 2)
    before = {process.pid for process in server.workers()}
    assert len(before) == 4
    server.workers()[0].kill()
    answer = client.chat.completions.create(model=server.model, **(STREAM | {"max_tokens": 8}))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    wait_until(
        lambda: len({process.pid for process in server.workers()} - before) == 2,
        timeout_s=RECOVERY_S,
        what="two new workers in the place of the killed one and its peer",
    )
    wait_for_groups(server, 2)


def test_streams_go_on_elsewhere_without_a_seam(client: OpenAI, server: ServeProcess) -> None:
    """Case BUG-091: workers are killed under running streams until one of a group that had streams was hit; no text
    shows it, and no token is counted twice."""
    undisturbed = stream_text(client, server.model)
    before = failovers(server)
    for _ in range(4):
        wait_for_groups(server, 2)
        texts = stream_while(client, server, lambda: server.workers()[0].kill())
        assert texts == [undisturbed] * 4
        if failovers(server) > before:
            return
    raise AssertionError("four kills, and no stream had to move: this test has shown nothing")


def stream_while(client: OpenAI, server: ServeProcess, disturb: Any) -> list[Any]:
    """The texts of four streams; ``disturb()`` is called when all of them run."""
    texts: list[Any] = []
    running = threading.Barrier(5, timeout=60)

    def run() -> None:
        waiting = True

        def on_chunk(text: str) -> None:
            nonlocal waiting
            if waiting and len(text) > 20:
                waiting = False
                running.wait()

        try:
            texts.append(stream_text(client, server.model, on_chunk))
        except Exception as error:
            texts.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    running.wait()
    disturb()
    for thread in threads:
        thread.join(120)
    return texts


BRANCHES = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
BEAMS = {"n": 2, "max_tokens": 60, "extra_body": {"beam_width": 4, "ignore_eos": True}}


def test_branches_and_beam_searches_go_on_elsewhere(client: OpenAI, server: ServeProcess) -> None:
    """Case BUG-091, with n, and with answers that are not streamed: two streams of three drawn choices, two beam
    searches. A worker is killed under them, until a group was hit that
    had both; what comes out is what came before, byte for byte."""
    undisturbed = [stream_choices(client, server, fields)[1] for fields in (BRANCHES, BEAMS)]
    moved: set[str] = set()
    for _ in range(4):
        wait_for_groups(server, 2)
        before = group_names(server)
        streams, searches = disturbed(client, server)
        assert [choices.texts for _, choices in streams] == [undisturbed[0].texts] * 2
        assert [choices.texts for _, choices in searches] == [undisturbed[1].texts] * 2
        assert {choices.reasons for _, choices in streams + searches} == {("length",) * 3, ("length",) * 2}
        wait_for_groups(server, 2)
        (lost,) = before - group_names(server)
        moved |= {"branches" for group, _ in streams if group == lost}
        moved |= {"beams" for group, _ in searches if group == lost}
        if moved == {"branches", "beams"}:
            wait_until_idle(server)
            return
    raise AssertionError(f"four kills, and only {moved} had to move: this test has shown nothing")


Answers = list[tuple[str, Choices]]


def disturbed(client: OpenAI, server: ServeProcess) -> tuple[Answers, Answers]:
    """A worker is killed when the streams have begun; the searches, which run since before, tell nothing until they
    end."""
    begun = threading.Barrier(3, timeout=60)

    def stream() -> tuple[str, Choices]:
        is_waiting = True

        def on_text(texts: dict[int, str]) -> None:
            nonlocal is_waiting
            if is_waiting and len(texts) == 3 and min(map(len, texts.values())) > 20:
                is_waiting = False
                begun.wait()

        return stream_choices(client, server, BRANCHES, on_text)

    with ThreadPoolExecutor(4) as threads:
        searches = [threads.submit(stream_choices, client, server, BEAMS) for _ in range(2)]
        streams = [threads.submit(stream) for _ in range(2)]
        begun.wait()
        server.workers()[0].kill()
        return [future.result(120) for future in streams], [future.result(120) for future in searches]


def stream_choices(
    client: OpenAI,
    server: ServeProcess,
    fields: dict[str, Any],
    on_text: Callable[[dict[int, str]], None] | None = None,
) -> tuple[str, Choices]:
    """The group that the stream began at, and its choices."""
    with client.completions.with_streaming_response.create(
        model=server.model, prompt="The lighthouse keeper", stream=True, **fields
    ) as response:
        return response.headers["x-octavo-group"], Choices.of_stream(response.parse(), on_text)


def group_names(server: ServeProcess) -> set[str]:
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    return set(re.findall(r'octavo_num_requests_running\{group="([^"]+)"', text))


def failovers(server: ServeProcess) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("octavo_gateway_failovers_total{"))


def test_the_router_is_killed_and_nobody_notices(client: OpenAI, server: ServeProcess) -> None:
    wait_for_groups(server, 2)
    router = server.processes("ray::RouterCore")
    assert len(router) == 1
    router[0].kill()
    for _ in range(5):
        answer = client.chat.completions.create(model=server.model, **(STREAM | {"max_tokens": 4}))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
    wait_until(
        lambda: len(server.processes("ray::RouterCore")) == 1 and server.processes("ray::RouterCore") != router,
        timeout_s=RECOVERY_S,
        what="a new router",
    )
    wait_for_groups(server, 2)


def test_ctrl_c_ends_what_does_not_end_in_time_and_leaves_nothing(server: ServeProcess) -> None:
    """Case BUG-110: endless streams get two seconds, and then an error that says why. The last test of the module's
    server, after all its kills."""
    wait_for_groups(server, 2)
    body = {"prompt": "Without an end:", "max_tokens": 8_000, "ignore_eos": True}
    with ThreadPoolExecutor(2) as threads:
        streams = [threads.submit(call, server, COMPLETION, body, stream=True) for _ in range(2)]
        wait_until(lambda: server.gauge("octavo_num_requests_running") == 2, timeout_s=30, what="both running")
        stop_and_look(server, signal.SIGINT)
        for answer in (stream.result(30) for stream in streams):
            assert answer.status == 200
            assert len(answer.text) > 20
            assert (answer.error or {})["code"] == "service_unavailable"
            assert "about to stop" in (answer.error or {})["message"]
