"""The shipped RayService the way KubeRay brings it up, changes it and takes its pods away (``tests/support/pods.py``).

What KubeRay and kubelet do is done to real Ray nodes; what Kubernetes itself does (Services, budgets, volumes) is not
there. The tests follow the life of one cluster, each from where the one before has left it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import httpx2 as httpx
import pytest
import yaml
from api_calls import chat
from load import steady_load
from long_streams import long_streams
from manifests import K8S, Document
from pods import EMBEDDED, SERVE, Pods, pods
from serve_process import wait_until

NAMES = ("cpu-demo", "production")
UP_S = 240.0
NUM_CPUS = 2
"""Of a pod: one group fits, as in production, where a pod has one GPU."""
NOTICED_S = 20.0
"""After which a Ray node gives up a head that is gone; 60 by default."""


def serve_config(cluster: Pods) -> Document:
    """Production's gateways and routers, with the model and the device of the demo: two groups, a gateway a pod."""
    demo, production = [yaml.safe_load((K8S / f"overlays/{name}/serve.yaml").read_text()) for name in NAMES]
    (application,), (other,) = demo["applications"], production["applications"]
    shared = {name: other["args"][name] for name in ("num_gateways", "max_gateways_per_node", "num_routers")}
    application["args"] |= shared
    demo["http_options"]["port"] = cluster.head.port(SERVE)
    return dict(demo)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Pods]:
    with pods(variables={"RAY_gcs_rpc_server_reconnect_timeout_s": str(int(NOTICED_S))}) as cluster:
        yield cluster


def serves(cluster: Pods) -> bool:
    """Every pod would be in the Service, and nothing is under way."""
    return cluster.status().get("status") == "RUNNING" and all(pod.probe("readinessProbe") for pod in cluster.workers)


def replicas(cluster: Pods, deployment: str) -> set[str]:
    """Those that run; none while the application is built anew."""
    found = cluster.status().get("deployments", {}).get(deployment, {}).get("replicas", [])
    return {replica["replica_id"] for replica in found if replica["state"] == "RUNNING"}


def test_workers_that_join_after_the_config_was_submitted_come_to_serve(cluster: Pods) -> None:
    assert all(cluster.head.probe(name) for name in ("startupProbe", "livenessProbe", "readinessProbe"))
    cluster.submit(serve_config(cluster))
    assert cluster.status()["status"] == "DEPLOYING"
    for address in ("127.0.0.3", "127.0.0.4"):
        assert cluster.add_worker(address, NUM_CPUS).probe("livenessProbe")
    wait_until(lambda: serves(cluster), timeout_s=UP_S, what="ready pods")
    for pod in (cluster.head, *cluster.workers):
        assert "Paris" in chat(pod, "What is the capital of France?", temperature=0, max_tokens=16).text
        assert httpx.get(f"{pod.url}/-/healthz", timeout=10).status_code == 200  # what the operator asks


def test_the_head_has_nothing_that_serving_needs(cluster: Pods) -> None:
    """It may go, where Redis keeps its state."""
    assert cluster.head.processes("ray::ServeController")
    assert not [each for name in ("ray::ServeReplica", "ray::RouterCore") for each in cluster.head.processes(name)]
    for worker in cluster.workers:
        assert worker.processes("ray::ServeReplica:octavo:Gateway")


def test_a_drained_pod_ends_no_stream(cluster: Pods) -> None:
    """The preStop hook only waits, for longer than this: without it is the harder case."""
    stays, goes = cluster.workers
    with long_streams([stays.url, stays.url, stays.url, goes.url, goes.url], EMBEDDED, 120):
        goes.terminate()
        cluster.add_worker("127.0.0.5", NUM_CPUS)
    grace_s = goes.template["spec"]["terminationGracePeriodSeconds"]
    goes.wait(grace_s)
    wait_until(lambda: serves(cluster), timeout_s=UP_S, what="ready pods")
    assert {pod.address for pod in cluster.workers} == {"127.0.0.3", "127.0.0.5"}


def test_another_number_of_groups_is_applied_in_place_under_load(cluster: Pods) -> None:
    """One group more, and a pod for it. (A single group would be ended before its successor is there.)"""
    config = serve_config(cluster)
    config["applications"][0]["args"]["replicas"] = 3
    cluster.add_worker("127.0.0.6", NUM_CPUS)
    before = replicas(cluster, "Gateway")
    with ExitStack() as stack:
        texts = [stack.enter_context(steady_load(pod, 1)) for pod in cluster.workers[:2]]
        cluster.submit(config)
        wait_until(lambda: len(replicas(cluster, "Gateway") - before) == 2, timeout_s=UP_S, what="new gateways")
        wait_until(lambda: serves(cluster), timeout_s=UP_S, what="ready pods")
    assert len(replicas(cluster, "WorkerGroup-0")) == 3
    assert len({text for of_pod in texts for text in of_pod}) == 1


def test_without_redis_a_lost_head_ends_every_pod_and_no_stream(cluster: Pods) -> None:
    """KubeRay starts them again; whoever serves does so until then."""
    (gcs,) = cluster.head.processes("gcs_server")
    workers = cluster.workers
    with long_streams([pod.url for pod in workers], EMBEDDED, 48):
        gcs.kill()
        assert cluster.head.wait(UP_S) == 1
    assert [pod.wait(UP_S) for pod in workers] == [1, 1, 1]
    assert "Some Ray subprocesses exited unexpectedly" in cluster.head.log.read_text()
