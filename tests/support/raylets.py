"""Ray nodes for tests, several on one machine: each a raylet with an address of its own, 127.0.0.2, 127.0.0.3, …"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from octavo.cluster.hosts.node import HEALTH_CHECKS
from octavo.cluster.local_ray import NICENESS, free_ports

START_S = 90
OBJECT_STORE_BYTES = 80_000_000
ANNOUNCED = 4
"""CPUs of a node: booked CPUs are a matter of placement, not of cores. Three ranks fit on one, with what else runs."""


class Raylets:
    """The head is 127.0.0.2; ``start`` adds a node, also in the place of one that was killed."""

    def __init__(self, folder: Path) -> None:
        self.token = secrets.token_hex(16)
        self.environment = os.environ | HEALTH_CHECKS | NICENESS
        self.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        self.environment |= {"RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo"}
        self.port = free_ports(1)[0]
        self.nodes: dict[str, psutil.Process] = {}
        """Address → raylet."""
        self.started: list[psutil.Process] = []
        self._folder = folder
        self.start("127.0.0.2", {"octavo_gateway": 1})

    @property
    def address(self) -> str:
        return f"127.0.0.2:{self.port}"

    def start(self, address: str, resources: dict[str, float] | None = None) -> None:
        """Raises RuntimeError with Ray's words when the node does not come up."""
        command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
        command += ["--node-ip-address", address, "--num-cpus", str(ANNOUNCED), "--temp-dir", str(self._folder)]
        command += ["--object-store-memory", str(OBJECT_STORE_BYTES), "--resources", json.dumps(resources or {})]
        head = ["--head", "--port", str(self.port), "--include-dashboard", "false"]
        head += ["--ray-client-server-port", str(free_ports(1)[0])]
        command += ["--address", self.address] if self.nodes else head
        before = set(self._running())
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=START_S)
        if done.returncode:
            raise RuntimeError(f"ray start {address}: {done.stdout}{done.stderr}")
        new = set(self._running()) - before
        self.started += new
        (self.nodes[address],) = [process for process in new if _name(process) == "raylet"]

    def processes(self, title: str) -> list[psutil.Process]:
        """Of all nodes, those whose title begins so, in the order of their start."""
        found = [child for node in self.nodes.values() for child in _children(node)]
        return sorted([process for process in found if _title(process).startswith(title)], key=_created)

    def stop(self) -> list[psutil.Process]:
        """End the nodes; what had not ended by itself a while after its raylet, and was killed."""
        descendants = {child for process in self.started for child in _children(process)}  # agents outlive a raylet
        for process in self.started:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _, alive = psutil.wait_procs(descendants, timeout=10)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return alive

    def _running(self) -> Iterator[psutil.Process]:
        """Processes with the cluster's folder or address on their command line: raylets, GCS, agents."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(self._folder) in word or self.address in word for word in process.cmdline()):
                    yield process


@contextlib.contextmanager
def raylets(*addresses: str) -> Iterator[Raylets]:
    """The head, and a node for each address; all ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="octavo-", ignore_cleanup_errors=True) as folder:
        nodes = Raylets(Path(folder))
        try:
            for address in addresses:
                nodes.start(address)
            yield nodes
        finally:
            nodes.stop()


def _children(process: psutil.Process) -> list[Any]:
    with contextlib.suppress(psutil.Error):
        return list(process.children(recursive=True))
    return []


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str(process.name())
    return ""


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, IndexError):
        return str(process.cmdline()[0])
    return ""


def _created(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        return float(process.create_time())
    return 0.0
