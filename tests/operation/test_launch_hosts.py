"""Hosts that do not fit, and hosts that go away while a cluster is started, or later: nothing is left behind."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from certificates import write_certificate
from tiny_text_model import save_tiny_text_model

from octavo.cluster.environment import default_cache_dir

NAME = "launched-by-a-test-of-hosts"
KEY = "the-right-key"
SHELL = Path(__file__).parent.parent / "support" / "local_shell.py"


class Hosts:
    """Two hosts on this machine, of which either can go away. ``launch`` and ``stop`` are the commands."""

    def __init__(self, folder: Path) -> None:
        self.away = folder / "away"
        self.away.write_text("")
        self._file = folder / "hosts"
        self.say("one address=127.0.0.2 num_cpus=3", "two address=127.0.0.3 num_cpus=3")

    def say(self, *lines: str) -> None:
        self._file.write_text("\n".join(lines))

    def launch(self, *words: str) -> subprocess.Popen[str]:
        shell = f"{sys.executable} {SHELL} -F {self.away}"
        return started("launch", "--hosts", str(self._file), "--name", NAME, "--ssh-command", shell, *words)

    @property
    def record(self) -> Path:
        return default_cache_dir() / "clusters" / f"{NAME}.json"

    def state(self) -> dict[str, Any]:
        return dict(json.loads(self.record.read_text()))

    def refusal(self, *words: str) -> str:
        """All that a launch says that starts nothing."""
        process = self.launch("--port", "0", *words)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 2, said
        assert not self.record.exists()
        return said


def started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "octavo.cluster", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cluster", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=170, check=False, env=os.environ | (environment or {})
    )


def running(cluster_id: str) -> list[str]:
    """Processes that have the cluster's name on their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if any(cluster_id in word for word in words):
            found.append(" ".join(words))
    return found


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path)
    yield hosts
    hosts.away.write_text("")
    ended("stop", NAME, "--now")


# ---- hosts that do not fit ----


def test_every_host_that_cannot_be_asked_is_named_with_what_to_do(hosts: Hosts) -> None:
    hosts.say("one", "away", "two python=/nowhere/python")
    said = hosts.refusal()
    assert "away: ssh: connect to host away port 22: Connection timed out: it does not answer; is it up" in said
    assert "two: there is no Python at /nowhere/python; install Octavo there" in said
    assert "2 things stand in the way (see above); nothing was started" in said


def test_another_version_on_one_host_is_named(hosts: Hosts, tmp_path: Path) -> None:
    info = tmp_path / "other" / "ray-9.9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 9.9.9\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={info.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    hosts.say("one address=127.0.0.2", f"two address=127.0.0.3 python={python}")
    assert "two: ray 9.9.9, but " in (said := hosts.refusal())
    assert "on one; install ray " in said


def test_a_host_named_twice_and_a_port_in_use_start_nothing(hosts: Hosts) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = hosts.refusal("--port", port)
    assert f"octavo launch: error: one: --port: cannot listen on 127.0.0.1:{port}: Address already in use" in said
    hosts.say("one", "two")
    assert "octavo launch: error: two: is the same machine as one; name it once" in hosts.refusal()
    hosts.say("one", "me@one")
    assert "octavo launch: error: HOST: one is named twice" in hosts.refusal()


# ---- hosts that go away ----


def test_a_host_that_goes_away_during_the_launch_is_named_and_the_others_are_cleared(hosts: Hosts) -> None:
    process = hosts.launch("--port", "0")
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "starting Ray …" in line:  # all hosts have been asked
            hosts.away.write_text("two")
            cluster_id = hosts.state()["id"]
    assert process.wait(60) == 1
    assert "error: two: ssh: connect to host two port 22: Connection timed out" in lines[-1]
    assert running(cluster_id) == []
    assert [member["host"]["name"] for member in hosts.state()["members"]] == ["two"]
    hosts.away.write_text("")
    assert ended("stop", NAME).returncode == 0
    assert not hosts.record.exists()


def test_several_models_with_keys_and_tls_are_watched_and_stopped_though_a_host_is_gone(
    hosts: Hosts, tmp_path: Path, model_dir: Path
) -> None:
    """The head is this machine. Paths in the file begin at its folder."""
    save_tiny_text_model(tmp_path / "model", tokens_of=model_dir)
    write_certificate(tmp_path, "server")
    (tmp_path / "keys").write_text(KEY)
    (tmp_path / "octavo.yaml").write_text(
        "host: localhost\nport: 0\nmax_num_seqs: 4\napi_key_file: keys\nssl_certfile: server.crt\n"
        "ssl_keyfile: server.key\nmodels:\n  - {model: ./model, served_model_name: long}\n"
        "  - {model: ./model, served_model_name: short, max_model_len: 64}\n"
    )
    hosts.say("two address=127.0.0.3 num_cpus=3")
    process = hosts.launch("--head-here", "--config", str(tmp_path / "octavo.yaml"))
    _, said = process.communicate(timeout=170)
    assert process.returncode == 0, said
    state = hosts.state()
    assert state["url"].startswith("https://localhost:")

    http = httpx.Client(verify=ssl.create_default_context(cafile=str(tmp_path / "server.crt")))
    url = f"{state['url']}/v1/completions"
    for model in ("long", "short"):
        body = {"model": model, "prompt": "One", "max_tokens": 2}
        answer = http.post(url, json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
        assert (answer.status_code, answer.json()["model"]) == (200, model)
        assert http.post(url, json=body, headers={"Authorization": "Bearer wrong"}).status_code == 401

    head = state["members"][0]["address"]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": state["token"]}
    watched = ended(
        *("top", "--once", "--json", "--interval", "0.2", "--address", f"{head}:{state['ray_port']}"),
        environment=token,
    )
    assert watched.returncode == 0, watched.stderr
    assert {model["model"] for model in json.loads(watched.stdout)["models"]} == {"long", "short"}

    hosts.away.write_text("two")
    stopped = ended("stop", NAME)
    assert stopped.returncode == 1
    assert "two: ssh: connect to host two port 22: Connection timed out" in stopped.stderr
    assert "1 of 2 hosts could not be asked; try again when they are back" in stopped.stderr
    left = running(state["id"])
    assert left, "the node of the host that is away goes on"
    assert all(f"{state['id']}-0" not in line for line in left)
    hosts.away.write_text("")
    assert ended("stop", NAME).returncode == 0
    assert running(state["id"]) == []
