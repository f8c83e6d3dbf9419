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

_LASTING_PORTS = range(20_000, 32_768)
"""Below the range of outgoing connections, which begins at 32,768 on Linux unless it was changed."""

OBJECT_STORE_BYTES = 100 * 1024 * 1024
"""Octavo passes nothing large through Ray's object store; Ray takes no less than 75 MiB."""

HAPROXY_BALANCE = "leastconn\n    no option splice-request\n    no option splice-response"
"""HAProxy 2.8 with ``option splice-request``, which Serve sets, often overlooks that a client has gone whose request
came in two pieces, and the request is computed to its end for nobody. There is no variable for splicing; the value of
this one stands at the end of the section in which a later option wins."""

HAPROXY_LOG = """127.0.0.1:514 local0 info
    tune.sndbuf.client 65536
    tune.rcvbuf.server 65536
    #"""
"""Of answers that a client does not read HAProxy's connections hold no more than these bytes each (megabytes without
them), so that the gateway notices. There is no variable for them; the value of this one stands in the section that they
belong in, before the words ``local0 info``."""

LEFTOVER_S = 10.0
"""How long processes may take to end by themselves when Ray has been shut down."""


def free_ports(count: int, host: str = "") -> list[int]:
    """Different TCP ports that are free at the moment, by default on all interfaces.

    They are bound seconds later, so they are none of those that the kernel gives to outgoing connections, if it can be.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        for candidate in (*random.sample(_LASTING_PORTS, 100 * count), *[0] * count):
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind((host, candidate))
                ports.append(int(probe.getsockname()[1]))
            if len(ports) == count:
                return ports
    raise OSError(errno.EADDRINUSE, f"there are no {count} free ports")


def auth_environment(environment: Environment, *, joining: bool) -> dict[str, str]:
    """How Ray's processes authenticate: always said, since left out they come to different conclusions.

    A Ray of our own gets a token that nobody else knows; one that is joined gets what the environment has.
    """
    has_token = bool(environment.ray_auth_token or environment.ray_auth_token_path)
    mode = environment.ray_auth_mode or ("disabled" if joining and not has_token else "token")
    if mode == "token" and not has_token and not joining:
        return {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {"RAY_AUTH_MODE": mode}


def own_ray_environment(scratch: Path, haproxy_section: str | None = None) -> dict[str, str]:
    """Further variables of a Ray of our own, for this process and all that it starts.

    HAProxy carries streamed tokens at half the cost of Serve's own proxy; its files and ports are ours alone, so that
    several clusters fit on one machine. ``haproxy_section`` is put into its configuration (``tls.py``).
    """
    metrics, stats = free_ports(2)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "server-state"),
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "\n".join(
            [HAPROXY_BALANCE, *([haproxy_section] if haproxy_section else [])]
        ),
        "RAY_SERVE_HAPROXY_LOG_TARGET": HAPROXY_LOG,
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


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
