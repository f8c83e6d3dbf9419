"""Starts this host's Ray node, with all that Octavo knows of running one."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from ...worker.errors import ConfigurationError, OctavoError
from ..haproxy import write_haproxy
from ..local_ray import LOG_ROTATION, OBJECT_STORE_BYTES, free_ports, own_ray_environment
from .answers import answer_in
from .probe import source_address
from .processes import ProcessId, tree

START_S = 90.0
"""From the keeper's start until its Ray node is there."""

REACH_S = 5.0

HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""A node that is gone is noticed in 2 s, one that hangs in 4 s; by default Ray takes 14 and 64."""

LOG_LINES = 8


def node_folder(marker: str) -> Path:
    """Ray's files and sockets on this host; the paths of sockets must be short."""
    return Path(tempfile.gettempdir()) / f"octavo-{marker}"


def start_node(orders: Mapping[str, Any]) -> dict[str, Any]:
    """Start a Ray node under a keeper, and wait until it is there; its address, ports and processes.

    Raises ConfigurationError for what can be mended, OctavoError with what Ray says otherwise.
    """
    marker = f"{orders['id']}-{orders['index']}"
    is_head = orders["index"] == 0
    address = orders["address"] or source_address(orders["head_address"])
    if address is None:
        raise ConfigurationError(f"there is no route to the head at {orders['head_address']}")
    ray_port = orders["ray_port"] or free_ports(1)[0]
    if not is_head:
        check_reachable(orders["head_address"], ray_port)
    folder = node_folder(marker)
    folder.mkdir(mode=0o700)
    front = _front(orders["config"], folder) if is_head else None
    environment = node_environment(orders, folder, address, None if front is None else front["section"])
    write_haproxy(environment)
    command = ray_command(orders, address, ray_port, folder)
    keeper = start_keeper(marker, folder, command, environment | {"RAY_AUTH_TOKEN": orders["token"]})
    return {
        "address": address,
        "ray_port": ray_port,
        "front": front,
        "environment": environment,
        "processes": [asdict(each) for each in _processes(keeper)],
    }


def ray_command(orders: Mapping[str, Any], address: str, ray_port: int, folder: Path) -> list[str]:
    """``ray start``. One CPU more is announced than there are, for processes that mostly wait."""
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--node-ip-address", address, "--temp-dir", str(folder)]
    command += ["--object-store-memory", str(OBJECT_STORE_BYTES)]
    command += ["--num-cpus", str(orders["num_cpus"] or (os.cpu_count() or 1) + 1)]
    if orders["num_gpus"] is not None:
        command += ["--num-gpus", str(orders["num_gpus"])]
    if orders["index"] == 0:
        resources = json.dumps(orders["head_resources"])
        command += ["--head", "--port", str(ray_port), "--include-dashboard", "false", "--resources", resources]
        return [*command, "--ray-client-server-port", str(free_ports(1)[0])]  # a fixed one otherwise
    head = orders["head_address"]
    return [*command, "--address", f"[{head}]:{ray_port}" if ":" in head else f"{head}:{ray_port}"]


def interface_of(address: str) -> str | None:
    """The network interface that has ``address``; None where several could be meant, or none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return str(name)
    return "lo" if address.startswith("127.") else None


def check_reachable(host: str, port: int) -> None:
    """Raises ConfigurationError when the head's port cannot be reached from here."""
    try:
        socket.create_connection((host, port), REACH_S).close()
    except OSError as error:
        raise ConfigurationError(
            f"the head at {host}:{port} cannot be reached from here ({error}); do firewalls let the cluster's hosts"
            " reach each other on all ports, and is the head's address (address=) right?"
        ) from error


def node_environment(
    orders: Mapping[str, Any], folder: Path, address: str, haproxy_section: str | None
) -> dict[str, str]:
    """For all processes of the node. What the host's own environment says of the interface is left alone."""
    environment = own_ray_environment(folder, haproxy_section) | HEALTH_CHECKS
    environment |= {name: value for name, value in LOG_ROTATION.items() if name not in os.environ}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "2"}
    if interface := orders["interface"] or interface_of(address):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if orders["interface"] or name not in os.environ:
                environment[name] = interface
    return environment


def _front(config: Mapping[str, Any], folder: Path) -> dict[str, Any] | None:
    from ..config import ServeConfig
    from ..front import front_of

    front = front_of(ServeConfig.parse(config), folder)
    return None if front is None else asdict(front)


def start_keeper(marker: str, folder: Path, command: list[str], environment: Mapping[str, str]) -> ProcessId:
    """The keeper, when its node is there. Raises OctavoError with the last lines of Ray's when it does not come up."""
    from .agent import KEEPER

    log = folder / "keeper.log"
    reading, writing = os.pipe()
    with log.open("wb") as out:
        keeper = subprocess.Popen(
            [sys.executable, "-P", "-m", KEEPER, marker],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            start_new_session=True,
            pass_fds=[writing],
            cwd="/",
        )
    os.close(writing)
    assert keeper.stdin is not None
    with keeper.stdin as pipe:
        pipe.write(json.dumps({"command": command, "environment": environment, "ready_fd": writing}).encode())
    identity = ProcessId.of(keeper.pid)
    if not _is_ready(reading) or identity is None:
        keeper.terminate()
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-LOG_LINES:]
        raise OctavoError(f"Ray did not start: {' | '.join(last) or 'it says nothing'}")
    return identity


def _is_ready(fd: int) -> bool:
    """Whether the keeper says so before ``START_S`` are over."""
    end, said = time.monotonic() + START_S, b""
    with os.fdopen(fd, "rb", buffering=0) as pipe:
        while (left_s := end - time.monotonic()) > 0 and select.select([pipe], [], [], left_s)[0]:
            part = pipe.read(4096)
            said += part or b""
            if b"\n" in said or not part:
                break
    return answer_in(said.decode()) is not None


def _processes(keeper: ProcessId) -> list[ProcessId]:
    """The keeper first, then all that it has started."""
    others = [identity for process in tree([keeper])[1:] if (identity := ProcessId.of(process.pid))]
    return [keeper, *others]
