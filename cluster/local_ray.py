"""A Ray and a Serve of our own on this machine: started for one command, and wholly gone after it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from .environment import Environment
from .haproxy import LOOPBACK, haproxy_environment

_LASTING_PORTS = range(20_000, 32_768)
"""Below the range of outgoing connections, which begins at 32,768 on Linux unless it was changed."""

OBJECT_STORE_BYTES = 100 * 1024 * 1024
"""Octavo passes nothing large through Ray's object store; Ray takes no less than 75 MiB."""

NICENESS = {"RAY_worker_niceness": "0"}
"""Ray would give a process that has come up 15 of niceness: ranks that run would starve while others import and load
at 0. Ours stand back while they come up instead (``worker/modesty.py``)."""

_KEEPS_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray puts another address of the machine in the place of 127.0.0.1, also where it is given as such, and a node with
another address listens on all interfaces. On two systems it does not do that, and this asks for the same."""

LOG_ROTATION = {"RAY_ROTATION_MAX_BYTES": str(64 * 2**20), "RAY_ROTATION_BACKUP_COUNT": "3"}
"""Of the files that hold what a process writes to its stderr and stdout: without them Ray lets those of workers grow.
Where they are set already, they stay."""

ONE_MACHINE = LOG_ROTATION | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Where all ranks are on this machine. What is set already stays."""

LEFTOVER_S = 10.0
"""How long processes may take to end by themselves when Ray has been shut down."""


def free_ports(count: int, host: str = "") -> list[int]:
    """Different TCP ports that are free at the moment, by default on all interfaces.

    They are bound seconds later, so they are none of those that the kernel gives to outgoing connections, if it can be.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        for candidate in (*random.sample(_LASTING_PORTS, 100 * count), *[0] * count):
            probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            with contextlib.suppress(OSError):
                probe.bind((host, candidate))
                ports.append(int(probe.getsockname()[1]))
            if len(ports) == count:
                return ports
    raise OSError(errno.EADDRINUSE, f"there are no {count} free ports")


def driver_environment(environment: Environment, *, joining: bool) -> dict[str, str]:
    """What a process needs before it imports Ray, whether it starts one or joins one.

    How Ray's processes authenticate is always said, since left out they come to different conclusions. A Ray of our own
    gets a token that nobody else knows; one that is joined gets what the environment has.
    """
    return _KEEPS_LOOPBACK | _authentication(environment, joining=joining)


def _authentication(environment: Environment, *, joining: bool) -> dict[str, str]:
    has_token = bool(environment.ray_auth_token or environment.ray_auth_token_path)
    mode = environment.ray_auth_mode or ("disabled" if joining and not has_token else "token")
    if mode == "token" and not has_token and not joining:
        return {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {"RAY_AUTH_MODE": mode}


def own_ray_environment(scratch: Path, haproxy_section: str | None = None) -> dict[str, str]:
    """Further variables of a Ray of our own, for this process and all that it starts.

    HAProxy carries streamed tokens at half the cost of Serve's own proxy. ``haproxy_section`` is put into its
    configuration (``front.py``), and ``write_haproxy`` must be called before it starts. On a busy machine a proxy takes
    longer to come up than Serve waits by itself: the third time it would begin anew.
    """
    metrics, stats = free_ports(2, LOOPBACK)
    return (
        haproxy_environment(scratch, haproxy_section, metrics_port=metrics, stats_port=stats)
        | NICENESS
        | {
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
            "RAY_USAGE_STATS_ENABLED": "0",
            "TOKENIZERS_PARALLELISM": "false",
        }
    )


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for sockets, whose paths must be short."""
    path = Path(tempfile.mkdtemp(prefix="octavo-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def no_process_left() -> Iterator[None]:
    """On leaving: what this process has started and has not ended in time is killed."""
    try:
        yield
    finally:
        children = psutil.Process().children(recursive=True)
        _, alive = psutil.wait_procs(children, timeout=LEFTOVER_S)
        for process in alive:
            logging.getLogger(__name__).warning("killing process %d (%s)", process.pid, process.name())
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def adopt_orphans() -> None:
    """Processes whose parents die become our children, so that ``no_process_left`` finds them (Linux)."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def set_environment(values: dict[str, str]) -> None:
    """Set variables for this process and those that it will start."""
    os.environ.update(values)
