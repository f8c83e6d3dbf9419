"""The doctor names what is wrong, on which node, and says what to do: each test plants one fault in good facts."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.cluster.cli import main
from octavo.cluster.config import ServeConfig
from octavo.cluster.doctor import gather as gathering
from octavo.cluster.doctor import gpus as nvml
from octavo.cluster.doctor.checks import CHECKS, examine
from octavo.cluster.doctor.command import examined
from octavo.cluster.doctor.facts import Facts, Gpu, Model, ModelFile, Node, Reduction, Wanted
from octavo.cluster.doctor.findings import Finding, Level, plain, worst
from octavo.cluster.doctor.gather import Question, gather, model_facts

VERSIONS: dict[str, str | None] = {
    "system": "Linux x86_64",
    "python": "3.11.7",
    "octavo": "0.1.0",
    "ray": "2.60.0",
    "torch": "2.13.0",
    "cuda": "12.8",
    "driver": "570.1",
    "driver_cuda": "12.8",
    "nccl": "2.27.3",
}
GPUS = tuple(Gpu(index, "NVIDIA H200", 140 * 2**30, 2**30, num_nvlinks=18) for index in range(2))
MODEL = Model("/models/m", "/models/m", {"config.json": ModelFile(700, "aa"), "m.safetensors": ModelFile(9000, "bb")})
TUNED = {"RAY_health_check_period_ms": "500", "RAY_AUTH_MODE": "token", "NCCL_SOCKET_IFNAME": "eth0"}


def node(number: int, **changes: Any) -> Node:
    good = Node(
        address=f"10.0.0.{number}",
        hostname=f"gpu{number}",
        versions=VERSIONS,
        environment=TUNED,
        num_cpus=64,
        memory_bytes=2**40,
        shm_bytes=2**36,
        interfaces=("eth0", "ib0", "lo"),
        interface="eth0",
        gpus=GPUS,
        num_torch_gpus=2,
        models=(MODEL,),
        cache_dir="/cache",
        cache_free_bytes=2**38,
        is_head=number == 1,
    )
    return replace(good, **changes)


WANTED = Wanted("auto", 2, 4, 0.9, serves_in_cluster=True)
GOOD_REDUCTION = Reduction(0, ("10.0.0.1", "10.0.0.1"), "nccl", 64 * 2**20, 0.0005)


def facts(second: Node | None = None, **changes: Any) -> Facts:
    good = Facts((node(1), second or node(2)), WANTED, reductions=(GOOD_REDUCTION,))
    return replace(good, **changes)


def with_version(name: str, version: str | None) -> Facts:
    return facts(node(2, versions=VERSIONS | {name: version}))


def with_gpu(**changes: Any) -> Facts:
    return facts(node(2, gpus=(GPUS[0], replace(GPUS[1], **changes))))


def with_model(**changes: Any) -> Facts:
    return facts(node(2, models=(replace(MODEL, **changes),)))


def with_variable(name: str, value: str) -> Facts:
    return facts(node(2, environment=TUNED | {name: value}))


def bad(given: Facts) -> list[Finding]:
    return [finding for finding in examine(given) if finding.level is not Level.GREEN]


def test_a_good_cluster_is_all_green() -> None:
    assert bad(facts()) == []
    assert len({finding.check for finding in examine(facts())}) >= len(CHECKS) - 4


RED = {
    "a node that does not answer": (facts(silent={"10.0.0.3": "no answer within 90 s"}), "no answer", "10.0.0.3"),
    "another Python": (with_version("python", "3.12.1"), "3.12.1, but 3.11.7 on 10.0.0.1", "10.0.0.2"),
    "another Ray": (with_version("ray", "2.59.0"), "2.59.0, but 2.60.0", "10.0.0.2"),
    "another torch": (with_version("torch", "2.12.0"), "2.12.0, but 2.13.0", "10.0.0.2"),
    "another octavo": (with_version("octavo", "0.2.0"), "0.2.0, but 0.1.0", "10.0.0.2"),
    "another NCCL": (with_version("nccl", "2.21.5"), "2.21.5, but 2.27.3", "10.0.0.2"),
    "no torch": (with_version("torch", None), "none, but 2.13.0", "10.0.0.2"),
    "a driver that is too old": (with_version("driver_cuda", "11.8"), "torch wants CUDA 12.8", "10.0.0.2"),
    "GPUs that torch cannot use": (facts(node(2, torch_gpu_error="CUDA error: ECC")), "CUDA error: ECC", "10.0.0.2"),
    "no GPU where one is asked for": (
        facts(node(2, gpus=()), nodes=(node(1, gpus=()),), wanted=replace(WANTED, device="cuda")),
        "no node has one",
        "",
    ),
    "a GPU full of others' data": (
        with_gpu(used_bytes=130 * 2**30, users=("python (7) 129.0 GiB",)),
        "GPU 1: 130.0 of 140.0 GiB are used, by python (7) 129.0 GiB",
        "10.0.0.2",
    ),
    "an interface that is not there": (with_variable("NCCL_SOCKET_IFNAME", "bond0"), "IFNAME=bond0", "10.0.0.2"),
    "a small /dev/shm": (facts(node(2, shm_bytes=64 * 2**20)), "64 MiB free, 128 MiB are needed", "10.0.0.2"),
    "no model": (with_model(folder=None, files={}, error="/models/m does not exist"), "does not exist", "10.0.0.2"),
    "a missing file": (with_model(files={"config.json": ModelFile(700, "aa")}), "no m.safetensors", "10.0.0.2"),
    "a half copied file": (
        with_model(files=MODEL.files | {"m.safetensors": ModelFile(4000, "bb")}),
        "m.safetensors has 4,000 bytes, 9,000 on 10.0.0.1",
        "10.0.0.2",
    ),
    "another version of a file": (
        with_model(files=MODEL.files | {"config.json": ModelFile(700, "cc")}),
        "the content of config.json is not that on 10.0.0.1",
        "10.0.0.2",
    ),
    "a full disk": (facts(node(2, cache_free_bytes=2**29)), "0.5 GiB free at /cache", "10.0.0.2"),
    "a cache that cannot be written": (facts(node(2, cache_error="/cache cannot be written")), "cannot", "10.0.0.2"),
    "a port in use": (facts(node(2, port_error="--port: in use")), "--port: in use", "10.0.0.2"),
    "a wrong key file": (facts(node(2, key_file_error="--api-key-file: holds no key")), "holds no key", "10.0.0.2"),
    "groups that cannot fit": (facts(placement_error="2 groups do not fit: …; add nodes"), "do not fit", ""),
    "ranks that do not meet": (
        facts(reductions=(Reduction(1, ("10.0.0.1", "10.0.0.2"), error="could not meet"),)),
        "group 1: could not meet",
        "10.0.0.1 10.0.0.2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", RED)
def test_a_fault_is_red_is_named_and_says_what_to_do(fault: str) -> None:
    given, what, where = RED[fault]
    found = [finding for finding in bad(given) if finding.level is Level.RED]
    assert len(found) == 1, plain(found or bad(given))
    assert what in found[0].what
    assert found[0].node == where
    assert found[0].advice


YELLOW = {
    "another driver": (with_version("driver", "550.9"), "550.9, but 570.1"),
    "variables that differ": (with_variable("NCCL_IB_DISABLE", "1"), "NCCL_IB_DISABLE differs: 'unset' on 10.0.0.1"),
    "slow health checks": (
        facts(node(2, environment={"RAY_AUTH_MODE": "token", "NCCL_SOCKET_IFNAME": "eth0"})),
        "a node that hangs is noticed after a minute",
    ),
    "an open Ray": (with_variable("RAY_AUTH_MODE", "disabled"), "whoever reaches Ray's ports"),
    "hidden GPUs": (facts(node(2, num_torch_gpus=1)), "torch sees 1 of 2"),
    "a GPU that others use, too": (with_gpu(used_bytes=20 * 2**30), "20.0 of 140.0 GiB"),
    "no peer access": (facts(node(2, gpus=(replace(GPUS[0], no_peer_access=(1,)), GPUS[1]))), "between 0-1"),
    "a link that is down": (with_gpu(num_nvlinks=0), "no NVLink at GPU 1"),
    "another interface than the route's": (with_variable("NCCL_SOCKET_IFNAME", "ib0"), "10.0.0.2 is on eth0"),
    "a model to be fetched": (with_model(folder=None, files={}), "not in the hub's cache"),
    "a cluster that is booked": (facts(is_booked="wanted: …"), "wanted: …"),
    "a slow all-reduce": (facts(reductions=(replace(GOOD_REDUCTION, seconds=0.5),)), "0.13 GB/s"),
}  # fmt: skip


@pytest.mark.parametrize("oddity", YELLOW)
def test_what_works_and_is_worth_a_look_is_yellow(oddity: str) -> None:
    given, what = YELLOW[oddity]
    found = bad(given)
    assert found
    assert worst(found) is Level.YELLOW, plain(found)
    assert any(what in finding.what for finding in found), plain(found)
    assert all(finding.advice for finding in found)


def test_the_table_can_be_read_without_colours() -> None:
    text = plain(examine(facts(node(2, shm_bytes=0))))
    line = next(line for line in text.splitlines() if "FAULT" in line)
    assert "/dev/shm" in line
    assert "10.0.0.2" in line
    assert "1 faults" in text


# ---- facts of this machine ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "m.safetensors").write_bytes(b"x" * 100)
    return path


def gathered(**values: Any) -> Node:
    return gather(Question({"port": 0, **values}, "127.0.0.1", is_head=True, checks_port=True))


def test_a_port_that_is_taken_is_found() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = gathered(port=taken.getsockname()[1])
    assert "Address already in use" in (found.port_error or "")
    assert gathered().port_error is None


def test_a_key_file_without_keys_is_found(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none\n")
    assert "holds no key" in (gathered(api_key_file=str(tmp_path / "keys")).key_file_error or "")


def test_a_wrong_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.1.0" if name == "ray" else true(name))
    first, second = replace(node(1), versions=VERSIONS), gathered()
    found = examine(facts(nodes=(first, replace(second, address="10.0.0.2", is_head=False, models=(MODEL,)))))
    assert any(finding.check == "ray" and "2.1.0, but 2.60.0" in finding.what for finding in found)


def test_files_of_a_model_are_compared_by_size_and_content(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    same = model_facts(str(other)).files
    assert same == model_facts(str(folder)).files
    (other / "m.safetensors").write_bytes(b"y" * 100)
    assert model_facts(str(other)).files != model_facts(str(folder)).files
    (other / "config.json").unlink()
    assert "has no config.json" in (model_facts(str(other)).error or "")
    assert "does not exist" in (model_facts(str(tmp_path / "nowhere")).error or "")


def test_a_cache_folder_that_cannot_be_written_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gathering.os, "access", lambda path, mode: False)
    assert "cannot be written" in (gathered(cache_dir=str(tmp_path / "deep" / "cache")).cache_error or "")


def test_an_address_where_no_ray_is_is_found() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    _, found = examined(ServeConfig.parse({"address": address}), 0)
    assert [finding.level for finding in found] == [Level.RED]
    assert f"nothing answers at {address}" in found[0].what


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_the_command_says_it_in_words_as_json_and_by_its_exit_code(taken_port: int) -> None:
    words = ["doctor", "--all-reduce-s", "0", "--device", "cpu", "--port"]
    sick = CliRunner().invoke(main, [*words, str(taken_port)], prog_name="octavo")
    assert sick.exit_code == 1
    assert "FAULT  port" in sick.stdout
    well = CliRunner().invoke(main, [*words, "0", "--json"], prog_name="octavo")
    assert well.exit_code == 0
    said = json.loads(well.stdout)
    assert said["facts"]["nodes"][0]["versions"]["octavo"]
    assert {finding["level"] for finding in said["findings"]} <= {"green", "yellow"}


# ---- what NVML says ----


class TwoGpus:
    """NVML of a node with two GPUs: one is used by this process, and they cannot read each other's memory."""

    NVMLError = RuntimeError
    NVML_P2P_STATUS_OK = 0

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda gpu: b"NVIDIA H200",
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=100, used=10 * gpu),
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
                SimpleNamespace(pid=os.getpid(), usedGpuMemory=2**30) for _ in range(gpu)
            ],
            "nvmlDeviceGetNvLinkState": self.link,
            "nvmlDeviceGetP2PStatus": lambda gpu, other, index: 1,
            "nvmlSystemGetDriverVersion": lambda: "570.1",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
        }
        return answers.get(name, lambda: None)

    def link(self, gpu: int, link: int) -> int:
        if link >= 4:
            raise self.NVMLError("no such link")
        return gpu


def test_gpus_are_told_with_their_users_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "pynvml", TwoGpus())
    first, second = nvml.gpus()
    assert nvml.driver_versions() == {"driver": "570.1", "driver_cuda": "12.8"}
    assert (first.name, first.used_bytes, first.users, first.num_nvlinks) == ("NVIDIA H200", 0, (), 0)
    assert (second.used_bytes, second.num_nvlinks, second.no_peer_access) == (10, 4, (0,))
    assert f"({os.getpid()}) 1.0 GiB" in second.users[0]


def test_without_nvml_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(TwoGpus):
        def nvmlInit(self) -> None:
            raise self.NVMLError("no driver")

    monkeypatch.setattr(nvml, "pynvml", Absent())
    assert nvml.gpus() == ()
    assert nvml.driver_versions() == {}
