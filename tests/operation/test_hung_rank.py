"""A rank that hangs inside a step while its process answers: the deadline of a step finds it, and no stream notices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from threading import Semaphore
from typing import Any

import psutil
import pytest
from frozen_thread import busiest_thread, frozen
from openai import OpenAI
from serve_client import Choices, metric
from serve_process import ServeProcess, wait_until

NUM_STREAMS = 4
DEADLINE_S = 6.0
STREAM: dict[str, Any] = {"temperature": 0, "max_tokens": 160, "stream": True, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def server() -> Iterator[ServeProcess]:
    process = ServeProcess("--replicas", "2", "--tensor-parallel-size", "2", "--step-timeout-s", str(DEADLINE_S))
    yield process
    process.stop()


def streams(server: ServeProcess, begun: Semaphore) -> Iterator[str]:
    """The same text for each, at the same time."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)

    def run(_: int) -> str:
        chunks = client.completions.create(model=server.model, prompt="The lighthouse keeper", **STREAM)
        first = next(chunks)
        begun.release()
        return Choices.of_stream(chain([first], chunks)).texts[0]

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        yield from threads.map(run, range(NUM_STREAMS))


def logs_of_ranks(server: ServeProcess) -> dict[psutil.Process, Path]:
    """Where each writes its stacks. What a rank has forked has none of its own."""
    files = [(process, file.path) for process in server.workers() for file in process.open_files()]
    return {process: Path(path) for process, path in files if path.endswith(f"-{process.pid}.err")}


def ended(ranks: Iterable[psutil.Process]) -> list[psutil.Process]:
    return [process for process in ranks if not process.is_running()]


def test_its_stacks_are_written_it_is_fenced_and_the_streams_go_on_elsewhere(server: ServeProcess) -> None:
    undisturbed = set(streams(server, Semaphore(0)))
    assert len(undisturbed) == 1
    begun = Semaphore(0)
    with ThreadPoolExecutor(1) as beside:
        texts = beside.submit(lambda: list(streams(server, begun)))
        for _ in range(NUM_STREAMS):
            assert begun.acquire(timeout=60)
        logs = logs_of_ranks(server)
        assert len(logs) == 4
        _, thread = busiest_thread(list(logs))
        with frozen(thread):
            assert texts.result(120) == [*undisturbed] * NUM_STREAMS
    wait_until(lambda: len(ended(logs)) == 2, timeout_s=30, what="both ranks of its group ended")
    assert all("most recent call first" in logs[process].read_text() for process in ended(logs))
    assert metric(server, "octavo_gateway_failovers_total") > 0
