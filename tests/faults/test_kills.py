"""Real kills: a worker process dies, idle, in the middle of streams and of beam searches; a rank of two dies; the
server is stopped."""

from __future__ import annotations

import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest
from openai import OpenAI
from serve_client import Choices, wait_until_idle
from serve_process import ServeProcess, wait_until

STREAM = {"messages": [{"role": "user", "content": "Count from one upwards."}], "temperature": 0, "max_tokens": 160}
RECOVERY_S = 90.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    """Two groups of two ranks."""
    process = ServeProcess("--replicas", "2", "--tensor-parallel-size", "2")
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
    text = ""
    for chunk in client.chat.completions.create(model=model, stream=True, extra_body={"ignore_eos": True}, **STREAM):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        if on_chunk is not None:
            on_chunk(text)
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
    """Workers are killed under running streams until one of a group that had streams was hit; no text shows it."""
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
    """Two streams of three drawn choices, two beam searches. A worker is killed under them, until a group was hit that
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


def stop_and_look(server: ServeProcess, number: int, during: Any = None) -> None:
    """Stop the server by a signal: exit code 0, no process left, its port free again."""
    started = server.descendants()
    assert started
    if during is not None:
        during()
    assert server.stop(number) == 0
    wait_until(lambda: not any(process.is_running() for process in started), timeout_s=5, what="no process left")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))


def test_ctrl_c_leaves_no_process_and_no_port(server: ServeProcess) -> None:
    """The last test of the module's server, after all its kills."""
    stop_and_look(server, signal.SIGINT)


def test_sigterm_finishes_what_is_under_way_and_leaves_nothing() -> None:
    server = ServeProcess("--replicas", "1")
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
    undisturbed = stream_text(client, server.model)
    texts: list[str] = []
    running = threading.Event()
    reader = threading.Thread(
        target=lambda: texts.append(stream_text(client, server.model, lambda text: running.set())), daemon=True
    )

    def stream_has_begun() -> None:
        reader.start()
        assert running.wait(60)

    try:
        stop_and_look(server, signal.SIGTERM, stream_has_begun)
        reader.join(10)
        assert texts == [undisturbed]
    finally:
        server.stop()
