"""``octavo doctor`` as a user calls it, where things are really wrong: each fault is named, at its node."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from raylets import Raylets, raylets

FAULT = re.compile(r"^FAULT +(?P<line>[^→]*)\n +→ (?P<advice>.+)$", re.MULTILINE)
PLANTED = "9.9.9"


def faults(*words: str, environment: dict[str, str] | None = None) -> list[str]:
    """The doctor's lines about faults, each of which says what to do; its exit code says that there are some."""
    command = [sys.executable, "-m", "octavo.cluster", "doctor", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=170, env=os.environ | (environment or {}), check=False
    )
    found = [match["line"] for match in FAULT.finditer(done.stdout)]
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{len(found)} faults" in done.stdout, done.stdout
    return found


def names(found: list[str], *signs: str) -> bool:
    """Whether one of the lines has all ``signs``."""
    return any(all(sign in line for sign in signs) for line in found)


def test_ten_faults_of_one_machine_are_each_named(tmp_path: Path) -> None:
    for name, file in (("weightless", "config.json"), ("shapeless", "model.safetensors")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    (tmp_path / "keys").write_text("# none\n")
    (tmp_path / "octavo.yaml").write_text(
        "device: cuda\ntensor_parallel_size: 64\napi_key_file: keys\ncache_dir: keys/cache\nmodels:\n"
        "  - {model: ./missing}\n  - {model: ./weightless}\n  - {model: ./shapeless}\n  - {model: no such/name}\n"
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = faults(
            *("--config", str(tmp_path / "octavo.yaml"), "--port", str(taken.getsockname()[1])),
            environment={"GLOO_SOCKET_IFNAME": "bond8", "NCCL_SOCKET_IFNAME": "bond9"},
        )
    assert names(found, "port", "Address already in use")
    assert names(found, "API keys", "holds no key")
    assert names(found, "cache folder", "keys is no folder")
    assert names(found, "interface", "GLOO_SOCKET_IFNAME=bond8")
    assert names(found, "interface", "NCCL_SOCKET_IFNAME=bond9")
    assert names(found, "model", "missing does not exist")
    assert names(found, "model", "weightless has no .safetensors file")
    assert names(found, "model", "shapeless has no config.json")
    assert names(found, "model", "no such/name is neither a file, nor a folder, nor a hub id")
    assert names(found, "placement", "64 ranks of 1 GPU")


def hub(folder: Path, *files: str) -> str:
    """A hub cache that holds a model ``owner/name`` with ``files``."""
    of_model = folder / "hub" / "models--owner--name"
    (of_model / "refs").mkdir(parents=True)
    (of_model / "refs" / "main").write_text("abc")
    (of_model / "snapshots" / "abc").mkdir(parents=True)
    for file in files:
        (of_model / "snapshots" / "abc" / file).write_text("{}")
    return str(folder)


def other_versions(folder: Path, *packages: str) -> str:
    """A folder for PYTHONPATH in which packages seem to be installed in another version."""
    for package in packages:
        info = folder / f"{package}-{PLANTED}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {PLANTED}\n")
    return str(folder)


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[Raylets]:
    """The second has other packages, another model, and an interface set that it has not."""
    with raylets() as nodes:
        sound = dict(nodes.environment)
        nodes.environment |= {
            "PYTHONPATH": other_versions(tmp_path / "packages", "octavo", "ray", "torch"),
            "HF_HOME": hub(tmp_path / "incomplete", "config.json", "model.safetensors"),
            "GLOO_SOCKET_IFNAME": "bond9",
        }
        nodes.start("127.0.0.3")
        nodes.environment = sound
        yield nodes


def test_faults_of_one_node_among_others_are_named_there(two_nodes: Raylets, tmp_path: Path) -> None:
    found = faults(
        *("owner/name", "--address", two_nodes.address, "--replicas", "1", "--tensor-parallel-size", "2"),
        *("--placement", "spread", "--all-reduce-s", "0.5"),
        environment=two_nodes.environment,
    )
    for package in ("octavo", "ray", "torch"):
        assert names(found, package, "127.0.0.3", f"{PLANTED}, but "), found
    assert names(found, "interface", "127.0.0.3", "GLOO_SOCKET_IFNAME=bond9"), found
    assert names(found, "all-reduce", "127.0.0.3", "could not meet"), found


def test_what_keeps_the_doctor_from_asking_is_a_fault_too(two_nodes: Raylets) -> None:
    at = ("--address", two_nodes.address, "--all-reduce-s", "0")
    assert names(faults(*at, environment={"RAY_AUTH_TOKEN": "f" * 32}), "cluster", "refuses our token")
    too_large = faults(*at, "--tensor-parallel-size", "64", environment=two_nodes.environment)
    assert names(too_large, "placement", "64 ranks of 1 CPU")
