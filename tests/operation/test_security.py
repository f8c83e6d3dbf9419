"""What others could do with a running cluster: where it listens, who may join it, and what its logs tell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2 as httpx
import psutil
import pytest
from serve_process import ServeProcess, wait_until

TOKEN = "0123456789abcdef" * 4
SECRET = "Abracadabrantesque"
"""A word of prompts that stands nowhere else."""

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    """With two ranks, which have a way to each other. Its logs are small enough to be turned over."""
    environment = os.environ | {"RAY_AUTH_TOKEN": TOKEN, "RAY_ROTATION_MAX_BYTES": "4000"}
    server = ServeProcess("--replicas", "1", "--tensor-parallel-size", "2", environment=environment)
    yield server
    assert server.stop() == 0


def listening(server: ServeProcess) -> dict[tuple[str, int], str]:
    """Address and port of every listening socket → the process's name."""
    found = {}
    for process in server.descendants():
        try:
            for each in process.net_connections(kind="tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found[each.laddr.ip, each.laddr.port] = process.name()
        except psutil.NoSuchProcess:
            continue
    return found


def gcs(server: ServeProcess) -> psutil.Process:
    (process,) = [process for process in server.descendants() if process.name() == "gcs_server"]
    return process


def logs(server: ServeProcess) -> Path:
    """The folder that all of Ray's processes log to."""
    flag = "--log_dir="
    return Path(next(word.removeprefix(flag) for word in gcs(server).cmdline() if word.startswith(flag)))


def top(server: ServeProcess, token: str) -> subprocess.CompletedProcess[str]:
    (port,) = [port for (_, port), name in listening(server).items() if name == "gcs_server"]
    command = [sys.executable, "-m", "octavo.cluster", "top", "--once", "--interval", "0.2"]
    environment = os.environ | {"RAY_AUTH_TOKEN": token}
    return subprocess.run(
        [*command, "--address", f"127.0.0.1:{port}"], env=environment, capture_output=True, text=True, timeout=120
    )


def test_nothing_listens_on_other_interfaces_when_nothing_was_said(server: ServeProcess) -> None:
    open_to_others = {at: name for at, name in listening(server).items() if at[0] not in LOOPBACK}
    assert open_to_others == {}
    names = set(listening(server).values())
    assert {"gcs_server", "raylet", "haproxy"} <= names  # what is looked at is really the cluster


def test_an_address_of_the_machine_is_the_api_s_alone_and_serves() -> None:
    address = "127.0.0.2"  # not the one that everything else has
    server = ServeProcess("--replicas", "1", "--host", address)
    try:
        port = urlsplit(server.url).port
        assert [at for at in listening(server) if at[0] not in LOOPBACK] == [(address, port)]
        body = {"model": server.model, "prompt": "One", "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    finally:
        assert server.stop() == 0


def test_who_has_the_token_may_watch_by_ray_and_nobody_else(server: ServeProcess) -> None:
    watched = top(server, TOKEN)
    assert watched.returncode == 0, watched.stderr
    assert server.model in watched.stdout
    refused = top(server, "f" * 64)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "refuses our token: RAY_AUTH_TOKEN" in refused.stderr


def test_no_log_holds_a_prompt_or_an_output_also_when_a_request_is_refused(server: ServeProcess) -> None:
    url, well = f"{server.url}/v1/completions", {"model": server.model, "prompt": SECRET, "max_tokens": 2}
    chat = {"model": server.model, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}
    refused = [{"max_tokens": -1}, {"prompt": {SECRET: 1}}, {"temperature": SECRET}, {SECRET: 1}, {"model": SECRET}]
    for _ in range(30):
        assert httpx.post(url, json=well, timeout=60).status_code == 200
    assert httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).status_code == 200
    assert httpx.post(url, json=well | {"stream": True, "echo": True}, timeout=60).status_code == 200
    for change in refused:
        assert httpx.post(url, json=well | change, timeout=60).status_code in (400, 404)
    assert httpx.post(url, content=f'{{"prompt": "{SECRET}', timeout=60).status_code == 400
    wait_until(lambda: "request finished" in told(server), timeout_s=20, what="a line of the access log")
    assert SECRET not in told(server)


def told(server: ServeProcess) -> str:
    """All that any process has written."""
    files = [file for file in logs(server).rglob("*") if file.is_file()]
    return "".join([*server.lines, *(file.read_text(errors="replace") for file in files)])


def test_the_logs_of_a_process_do_not_grow_without_end(server: ServeProcess) -> None:
    """The gateway has written a line for each request by now."""
    wait_until(lambda: any(logs(server).glob("worker-*.err.1")), timeout_s=20, what="a log that was turned over")
    assert max(file.stat().st_size for file in logs(server).glob("worker-*.err*")) < 8000
