"""A Ray and a Serve of our own on this machine: started for one command, and wholly gone after it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from .environment import Environment

OBJECT_STORE_BYTES = 100 * 1024 * 1024
"""Octavo passes nothing large through Ray's object store; Ray takes no less than 75 MiB."""

LEFTOVER_S = 10.0
"""How long processes may take to end by themselves when Ray has been shut down."""


def free_ports(count: int) -> list[int]:
    """Different TCP ports that are free at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for candidate in sockets:
            candidate.bind(("127.0.0.1", 0))
        return [int(candidate.getsockname()[1]) for candidate in sockets]


def ray_environment(environment: Environment, scratch: Path) -> dict[str, str]:
    """Variables that Ray and Serve read, for this process and all that it starts.

    The authentication mode is always said: where it is left out, Ray's processes come to different conclusions.
    HAProxy carries streamed tokens at half the cost of Serve's own proxy; its files and ports are ours alone, so that
    several clusters fit on one machine.
    """
    metrics, stats = free_ports(2)
    values = {
        "RAY_AUTH_MODE": environment.ray_auth_mode or "token",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if values["RAY_AUTH_MODE"] == "token" and not (environment.ray_auth_token or environment.ray_auth_token_path):
        values["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return values


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
