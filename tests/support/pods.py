"""Ray nodes as KubeRay starts them, without Kubernetes: from the shipped RayService, each pod at an address of its own.

A pod here is what KubeRay makes of the manifest, run on this machine: its command line with the group's rayStartParams
and limits, the container's environment, its probes, its preStop hook and SIGTERM. Pods share the machine, so a port of
the manifest is another one in each of them (``Pod.port``), and what only a cluster has is left out: volumes, Secrets.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import yaml
from manifests import K8S, Document, environment
from serve_process import wait_until

from octavo.cluster.environment import default_cache_dir
from octavo.cluster.local_ray import free_ports

HEAD = "127.0.0.2"
GCS, DASHBOARD, AGENT, SERVE = 6379, 8265, 52365, 8000
RAY_METRICS, RAY_CLIENT, PROXY_METRICS, PROXY_STATS = 8080, 10001, 9101, 8404
START_S = 120.0
STARTS = 3
OBJECT_STORE_BYTES = 80_000_000
"""The manifest's is for pods that do not share their memory."""
NAMED_PORTS = {"dashboard": DASHBOARD, "serve": SERVE}
EMBEDDED = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Redis:
    """What KubeRay makes variables of where the manifest has gcsFaultToleranceOptions."""

    address: str
    password: str

    def variables(self, group: str) -> dict[str, str]:
        if group == "worker":
            return {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
        return {
            "RAY_REDIS_ADDRESS": self.address,
            "REDIS_PASSWORD": self.password,
            "RAY_external_storage_namespace": "uid-of-the-cluster",
        }


def ray_service() -> Document:
    """The RayService of kustomize's base; ``tests/k8s`` holds that overlays and the chart have its pods."""
    return dict(yaml.safe_load((K8S / "base" / "rayservice.yaml").read_text()))


@dataclass
class Pod:
    """One Ray node that runs, or is about to."""

    model = EMBEDDED
    address: str
    template: Document
    process: subprocess.Popen[bytes]
    ports: dict[int, int]
    log: Path
    family: set[psutil.Process] = field(default_factory=set)
    """All that it has started, as far as it was seen: some outlive their parent."""

    def port(self, number: int | str) -> int:
        """Where a port of the manifest is on this machine, by number or name."""
        return self.ports[NAMED_PORTS[number] if isinstance(number, str) else number]

    @property
    def url(self) -> str:
        """Of the proxy."""
        return f"http://{self.address}:{self.port(SERVE)}"

    def probe(self, name: str) -> bool:
        """Ask what kubelet asks, in the time that it gives: ``readinessProbe``, ``livenessProbe``, ``startupProbe``."""
        probe = self.template["spec"]["containers"][0][name]
        get = probe["httpGet"]
        with contextlib.suppress(httpx.HTTPError):
            url = f"http://{self.address}:{self.port(get['port'])}{get['path']}"
            return 200 <= httpx.get(url, timeout=probe["timeoutSeconds"]).status_code < 400
        return False

    def terminate(self) -> None:
        """SIGTERM to the container's first process, as kubelet sends it after preStop."""
        self.family |= set(self.processes())
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """Until the container's first process has ended, with which the container does; its exit code."""
        self.family |= set(self.processes())
        code = self.process.wait(timeout_s)
        kill(self.family)
        return code

    def processes(self, name: str = "") -> list[psutil.Process]:
        """All of the pod, or those whose program or title begins with ``name``, in the order of their start."""
        found = []
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(self.process.pid).children(recursive=True)
        return sorted([each for each in found if _is_named(each, name)], key=lambda each: each.create_time())


class Pods:
    """The pods of one RayCluster; ``start_head`` comes first."""

    def __init__(self, folder: Path, redis: Redis | None = None, variables: dict[str, str] | None = None) -> None:
        cluster = ray_service()["spec"]["rayClusterConfig"]
        self._groups = {"head": cluster["headGroupSpec"], "worker": cluster["workerGroupSpecs"][0]}
        self._folder, self._redis = folder, redis
        self._token = secrets.token_hex(16)
        self._variables = {"RAY_AUTH_MODE": cluster["authOptions"]["mode"], "RAY_AUTH_TOKEN": self._token}
        self._variables |= variables or {}
        self._head_ports = ports_of_a_pod()
        self.head: Pod
        self.started: list[Pod] = []

    def start_head(self) -> None:
        """Also in the place of one that died; KubeRay's Service leads to it under the same name and ports.

        It finds no trace of the other one's, as in a container of its own: Ray would take the workers' for it.
        """
        (self._folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)
        self.head = self._start("head", HEAD, None, self._head_ports)
        wait_until(lambda: self.head.probe("readinessProbe"), timeout_s=START_S, what="a head that is ready")

    def add_worker(self, address: str, num_cpus: int) -> Pod:
        return self._start("worker", address, num_cpus, ports_of_a_pod())

    @property
    def workers(self) -> list[Pod]:
        """Those that run."""
        return [pod for pod in self.started if pod.address != HEAD and pod.process.poll() is None]

    @property
    def api(self) -> httpx.Client:
        """Of the head's dashboard, as KubeRay's operator uses it."""
        base = f"http://{HEAD}:{self.head.port(DASHBOARD)}"
        return httpx.Client(base_url=base, headers={"Authorization": f"Bearer {self._token}"}, timeout=60)

    @property
    def command_environment(self) -> dict[str, str]:
        """For commands that speak to the cluster."""
        return os.environ | self._variables

    def submit(self, config: Document) -> None:
        """What KubeRay does with serveConfigV2 as soon as the head is there, and when it has changed."""
        with self.api as api:
            answer = api.put("/api/serve/applications/", json=config)
        assert answer.status_code == 200, answer.text

    def status(self) -> Document:
        """Of the application; empty while there is none, or nobody to ask."""
        with contextlib.suppress(httpx.HTTPError), self.api as api:
            answer = api.get("/api/serve/applications/")
            applications = answer.json()["applications"] if answer.status_code == 200 else {}
            return dict(applications.get("octavo", {}))
        return {}

    def end(self) -> None:
        """Kill all that is left, also what outlived its parent unseen, as an HAProxy that took over from another."""
        for pod in self.started:
            pod.family |= set(pod.processes())
            if pod.process.poll() is None:
                pod.process.kill()
            pod.wait(START_S)
        kill({process for process in psutil.process_iter() if _is_at_home_in(process, self._folder)})

    def _start(self, group: str, address: str, num_cpus: int | None, ports: dict[int, int]) -> Pod:
        """A container that ends while it starts (a raylet has 30 s) is started again, as kubelet does."""
        for _ in range(STARTS):
            pod = self._launch(group, address, num_cpus, ports)
            wait_until(partial(_has_started_or_ended, pod), timeout_s=START_S, what=f"{group} {address}")
            if pod.process.poll() is None:
                return pod
            pod.wait(START_S)
        raise AssertionError(pod.log.read_text())

    def _launch(self, group: str, address: str, num_cpus: int | None, ports: dict[int, int]) -> Pod:
        template = self._groups[group]["template"]
        command = start_command(self._groups[group], address, num_cpus, ports, self._folder)
        if group == "worker":
            command += f" --address={HEAD}:{self.head.port(GCS)}"
        elif self._redis is not None:
            command += " --redis-password=$REDIS_PASSWORD"
        variables = self._container_environment(template) | proxy_variables(ports, self._folder) | self._variables
        variables |= {} if self._redis is None else self._redis.variables(group)
        log = self._folder / f"{address}-{len(self.started)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["/bin/bash", "-c", "--", f"ulimit -n 65536 2>/dev/null; {command}"],
                env=os.environ | variables,
                stdout=out,
                stderr=out,
                cwd=self._folder,
                start_new_session=True,
            )
        self.started.append(pod := Pod(address, template, process, ports, log))
        return pod

    def _container_environment(self, template: Document) -> dict[str, str]:
        """The manifest's variables, but for Secrets and for the folders of volumes."""
        values = environment(template)
        return {name: value for name, value in values.items() if isinstance(value, str)} | {
            "OCTAVO_CACHE_DIR": str(default_cache_dir()),
            "HF_HOME": str(self._folder / "huggingface"),
            "GLOO_SOCKET_IFNAME": "lo",
        }


def start_command(group: Document, address: str, num_cpus: int | None, ports: dict[int, int], folder: Path) -> str:
    """KubeRay's, which makes options of the group's rayStartParams and of the container's limits.

    What follows are the options that let pods share a machine.
    """
    ray = f"{sys.executable} -P -m ray.scripts.scripts start"
    options: dict[str, Any] = dict(group["rayStartParams"])
    options |= {"block": None, "dashboard-agent-listen-port": ports[AGENT], "metrics-export-port": ports[RAY_METRICS]}
    if num_cpus is not None:
        options.setdefault("num-cpus", num_cpus)
    if address == HEAD:
        options |= {"head": None, "port": ports[GCS], "dashboard-port": ports[DASHBOARD]}
        options |= {"ray-client-server-port": ports[RAY_CLIENT], "temp-dir": folder / "ray"}
    options |= {"node-ip-address": address, "object-store-memory": OBJECT_STORE_BYTES}
    words = [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]
    return " ".join([ray, *words])


def ports_of_a_pod() -> dict[int, int]:
    numbers = (GCS, DASHBOARD, AGENT, SERVE, RAY_METRICS, RAY_CLIENT, PROXY_METRICS, PROXY_STATS)
    return dict(zip(numbers, free_ports(len(numbers)), strict=True))


def proxy_variables(ports: dict[int, int], folder: Path) -> dict[str, str]:
    """Serve's, that a pod does not need: ports and folders are its own."""
    files = {"CONFIG_FILE_LOC": "haproxy.cfg", "SOCKET_PATH": "admin.sock", "METRICS_SOCKET_PATH": "metrics.sock"}
    files |= {"SERVER_STATE_BASE": "", "SERVER_STATE_FILE": "server-state"}
    return {f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in files.items()} | {
        "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(ports[SERVE]),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[PROXY_METRICS]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[PROXY_STATS]),
    }


@contextlib.contextmanager
def pods(redis: Redis | None = None, variables: dict[str, str] | None = None) -> Iterator[Pods]:
    """The head; all pods are gone afterwards. ``variables``: of every container, beside the manifest's."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-"))
    cluster = Pods(folder, redis, variables)
    try:
        cluster.start_head()
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


def kill(processes: set[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _has_started_or_ended(pod: Pod) -> bool:
    return pod.process.poll() is not None or pod.probe("startupProbe")


def _is_at_home_in(process: psutil.Process, folder: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.cwd() == str(folder)
    return False


def _is_named(process: psutil.Process, name: str) -> bool:
    with contextlib.suppress(psutil.Error, IndexError):
        return process.name().startswith(name) or process.cmdline()[0].startswith(name)
    return False
