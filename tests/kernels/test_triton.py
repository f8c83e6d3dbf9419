"""The Triton kernels: interpreted, against the same tests as the others, and compiled for every target.

Both need processes of their own, since Triton decides at import whether it interprets; they run side by side.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NAMES = ("adapters", "attention", "cache", "elementwise", "experts", "logprobs", "quantized_linear", "sample")
SUBJECTS = [str(HERE / f"test_{name}.py") for name in NAMES]
COMMANDS = {
    "interpret": ["-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUBJECTS],
    "compile": [str(HERE / "compile_triton.py"), "sm_80", "sm_90", "sm_100", "gfx942"],
}


@pytest.fixture(scope="module")
def finish(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Waits for one of the commands, all started now, and returns what it printed."""
    folder = tmp_path_factory.mktemp("triton")
    processes = {name: start(name, folder / name) for name in COMMANDS}

    def wait(name: str) -> str:
        code = processes[name].wait()
        printed = (folder / name).read_text()
        assert code == 0, printed[-8000:]
        return printed

    yield wait
    for process in processes.values():
        process.kill()
        process.wait()


def start(name: str, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TRITON_INTERPRET": str(int(name == "interpret"))}
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *COMMANDS[name]], env=environment, stdout=output, stderr=subprocess.STDOUT
        )


def test_interpreted_kernels_pass_the_tests_of_the_others(finish: Callable[[str], str]) -> None:
    assert " passed" in finish("interpret")


def test_every_kernel_compiles_for_every_target(finish: Callable[[str], str]) -> None:
    printed = finish("compile").splitlines()
    assert [line for line in printed if line[0] != " "] == ["sm_80", "sm_90", "sm_100", "gfx942", "all fit"]
