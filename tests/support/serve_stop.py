"""A server is stopped, and nothing of it is left."""

from __future__ import annotations

import socket
from collections.abc import Callable

import httpx2 as httpx
from serve_process import ServeProcess, wait_until


def stop_and_look(
    server: ServeProcess, number: int, during: Callable[[], None] = lambda: None, expected_code: int = 0
) -> None:
    """Send the signal, do something ``during`` the drain, and wait for the end: the exit code, no process left, its
    port free again."""
    started = server.descendants()
    assert started
    server.process.send_signal(number)
    during()
    assert server.wait() == expected_code, "".join(server.lines[-20:])
    wait_until(lambda: not any(process.is_running() for process in started), timeout_s=5, what="no process left")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))


def wait_until_draining(server: ServeProcess) -> None:
    """It says that it is not ready, and why it is still there."""
    wait_until(lambda: httpx.get(f"{server.url}/ready", timeout=30).status_code != 200, timeout_s=20, what="draining")
