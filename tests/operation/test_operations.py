"""Operating a cluster under load: groups are added, taken away, drained and updated, and no request notices."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import pytest
from openai import OpenAI
from raylets import Raylets, raylets
from serve_client import wait_until_idle
from serve_process import ServeProcess

NUM_CLIENTS = 6
COMMAND_S = 120.0
FLAGS = ("--replicas", "2", "--max-num-seqs", "8", "--num-gpu-blocks-override", "600")


@dataclass
class Cluster:
    """Two groups on a Ray of the test's own, and Octavo's commands for it."""

    nodes: Raylets
    server: ServeProcess

    def octavo(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "octavo.cluster", *words, "--address", self.nodes.address]
        return subprocess.run(
            command, env=self.nodes.environment, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )

    def operate(self, *words: str) -> str:
        """A command that does what it should; what it said."""
        done = self.octavo(*words)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def groups(self) -> set[str]:
        text = httpx.get(f"{self.server.url}/metrics", timeout=30).text
        return set(re.findall(r'octavo_num_requests_running\{group="([^"]+)"', text))

    @contextmanager
    def load(self) -> Iterator[list[str]]:
        """Requests all the time, each client one after the other; the texts of all, when it is over."""
        client = OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0, timeout=120)
        ends, texts = threading.Event(), list[str]()
        begun = threading.Semaphore(0)

        def ask() -> None:
            while not ends.is_set():
                texts.append(_stream(client, self.server.model))
                begun.release()

        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            clients: list[Future[None]] = [threads.submit(ask) for _ in range(NUM_CLIENTS)]
            try:
                assert begun.acquire(timeout=60)
                yield texts
            finally:
                ends.set()
            for each in clients:
                each.result(120)


def _stream(client: OpenAI, model: str) -> str:
    """A text of 24 tokens, streamed; that it comes, and is whole, is the test."""
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    chunks = client.completions.create(model=model, prompt="The lighthouse keeper", stream=True, **fields)
    text, reasons = "", []
    for chunk in chunks:
        text += chunk.choices[0].text
        reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert reasons == ["length"]
    return text


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with raylets() as nodes:
        server = ServeProcess("--address", nodes.address, *FLAGS, environment=nodes.environment)
        try:
            yield Cluster(nodes, server)
        finally:
            server.stop()


def test_a_group_is_added_and_another_one_removed_under_load(cluster: Cluster) -> None:
    first, second = sorted(cluster.groups())
    with cluster.load() as texts:
        assert "worker groups wanted: 3, serving: 2" in cluster.operate("scale", "3")
        assert f"{first}: removed, 2 left" in cluster.operate("drain", first, "--remove")
        assert "wanted: 2, serving: 2" in cluster.operate("scale", "2")
    assert len(set(texts)) == 1
    wait_until_idle(cluster.server)
    assert second in cluster.groups()
    assert first not in cluster.groups()


def test_a_drained_group_is_replaced_under_load(cluster: Cluster) -> None:
    before = cluster.groups()
    name = sorted(before)[0]
    with cluster.load() as texts:
        assert f"{name}: draining" in cluster.operate("drain", name)
        cluster.operate("scale", "2")
    assert len(set(texts)) == 1
    wait_until_idle(cluster.server)
    after = cluster.groups()
    assert name not in after
    assert len(after & before) == 1


def test_an_update_replaces_every_group_under_load(cluster: Cluster) -> None:
    before = cluster.groups()
    with cluster.load() as texts:
        said = cluster.operate("update", "--max-num-batched-tokens", "64")
    assert "2 of 2 worker groups replaced" in said
    assert len(set(texts)) == 1
    wait_until_idle(cluster.server)
    assert len(cluster.groups() - before) == 2


def test_groups_that_are_too_many_are_taken_away_under_load(cluster: Cluster) -> None:
    with cluster.load() as texts:
        assert "wanted: 1, serving: 2" in cluster.operate("scale", "1")
    assert len(set(texts)) == 1
    wait_until_idle(cluster.server)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("drain", "group-none"), "GROUP: there is no worker group group-none"),
        (("update",), "--surge is needed"),
        (("update", "--surge", "--max-num-batched-tokens", "2"), "--max-num-batched-tokens: must be at least"),
        (("scale", "2", "--served-model-name", "other"), "--served-model-name: say which model"),
        (("scale", "2", "--app-name", "other"), "--app-name: no application 'other'"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(cluster: Cluster, words: tuple[str, ...], reason: str) -> None:
    done = cluster.octavo(*words)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert reason in done.stderr
