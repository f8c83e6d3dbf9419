"""Operating a cluster under load: groups are added, taken away, drained and updated, and no request notices."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import pytest
from load import steady_load
from other_weights import other_weights
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
    with steady_load(cluster.server, NUM_CLIENTS) as texts:
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
    with steady_load(cluster.server, NUM_CLIENTS) as texts:
        assert f"{name}: draining" in cluster.operate("drain", name)
        cluster.operate("scale", "2")
    assert len(set(texts)) == 1
    wait_until_idle(cluster.server)
    after = cluster.groups()
    assert name not in after
    assert len(after & before) == 1


def test_an_update_replaces_every_group_under_load_and_no_answer_has_tokens_of_two_models(
    cluster: Cluster, model_dir: Path, tmp_path: Path
) -> None:
    """Streams that have not finished when their group is drained go on where the old weights are."""
    before = cluster.groups()
    folder = other_weights(model_dir, tmp_path / "other")
    with steady_load(cluster.server, NUM_CLIENTS) as texts:
        said = cluster.operate("update", "--model", str(folder), "--max-num-batched-tokens", "64", "--limit-s", "0")
    assert "2 of 2 worker groups replaced" in said
    assert len(set(texts)) == 2, set(texts)
    assert texts[0] != texts[-1]
    wait_until_idle(cluster.server)
    assert len(cluster.groups() - before) == 2


def test_groups_that_are_too_many_are_taken_away_under_load(cluster: Cluster) -> None:
    with steady_load(cluster.server, NUM_CLIENTS) as texts:
        assert "wanted: 1, serving: 2" in cluster.operate("scale", "1")
    assert len(set(texts)) == 1
    wait_until_idle(cluster.server)


def test_the_only_group_is_updated_under_load_behind_one_that_comes_first(cluster: Cluster) -> None:
    (name,) = cluster.groups()
    with steady_load(cluster.server, NUM_CLIENTS) as texts:
        assert "1 of 1 worker groups replaced" in cluster.operate("update", "--surge")
    assert len(set(texts)) == 1
    wait_until_idle(cluster.server)
    assert len(cluster.groups()) == 1
    assert name not in cluster.groups()


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
