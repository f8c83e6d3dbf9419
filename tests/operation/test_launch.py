"""``octavo launch`` brings up two Ray nodes, with a stand-in for ssh; ``octavo stop`` leaves nothing of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

from octavo.cluster.environment import default_cache_dir
from octavo.cluster.hosts.processes import ProcessId

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SHELL = f"{sys.executable} {Path(__file__).parent.parent / 'support' / 'local_shell.py'}"
HOSTS = """
one address=127.0.0.2 num_cpus=3   # the head
two address=127.0.0.3 num_cpus=3
"""
NAME = "launched-by-a-test"


def octavo(
    *words: str, timeout_s: float, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cluster", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, env=os.environ | (environment or {})
    )


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "hosts"
    file.write_text(HOSTS)
    yield file
    octavo("stop", NAME, "--now", timeout_s=120)


def test_a_cluster_on_two_hosts_answers_and_is_wholly_gone_after_stop(hosts: Path) -> None:
    before = {process.pid for process in psutil.process_iter()}
    words = ["--hosts", str(hosts), "--ssh-command", SHELL, "--name", NAME, "--port", "0"]
    launched = octavo(
        "launch", *words, "--tensor-parallel-size", "2", "--placement", "spread", "--replicas", "1", timeout_s=170
    )
    assert launched.returncode == 0, launched.stderr
    state = json.loads((default_cache_dir() / "clusters" / f"{NAME}.json").read_text())
    assert [member["address"] for member in state["members"]] == ["127.0.0.2", "127.0.0.3"]
    assert state["token"] not in " ".join(command_line for pid in psutil.pids() for command_line in words_of(pid))

    client = OpenAI(base_url=f"{state['url']}/v1", api_key="none", max_retries=0, timeout=60)
    answer = client.chat.completions.create(
        model=state["model_names"][0], messages=QUESTION, temperature=0, max_tokens=16
    )
    assert "Paris" in str(answer.choices[0].message.content)

    doctor = octavo(
        *("doctor", "--address", f"127.0.0.2:{state['ray_port']}", "--tensor-parallel-size", "2", "--replicas", "1"),
        *("--placement", "spread", "--all-reduce-s", "0.5"),
        timeout_s=120,
        environment={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": state["token"]},
    )
    assert "FAULT" not in doctor.stdout, doctor.stdout + doctor.stderr
    (nodes,) = re.findall(r"all-reduce +(\S+ \S+) +group 0: 4 MiB in", doctor.stdout)
    assert set(nodes.split()) == {"127.0.0.2", "127.0.0.3"}

    started = [ProcessId(**process) for member in state["members"] for process in member["processes"]]
    assert any(process.is_alive for process in started)
    stopped = octavo("stop", NAME, timeout_s=150)
    assert stopped.returncode == 0, stopped.stderr
    left = [psutil.Process(pid) for pid in set(psutil.pids()) - before if is_of(state["id"], pid)]
    assert left == []
    assert not any(process.is_alive for process in started)
    assert not (default_cache_dir() / "clusters" / f"{NAME}.json").exists()
    assert "nothing to stop" in octavo("stop", NAME, timeout_s=30).stderr


def words_of(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def is_of(cluster_id: str, pid: int) -> bool:
    """Ray's processes name the folder of their node."""
    return any(cluster_id in word for word in words_of(pid))
