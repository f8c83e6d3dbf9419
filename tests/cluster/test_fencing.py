"""Ranks that are given up are ended and seen to be gone: real processes, stopped ones too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from octavo.cluster.fencing import RankProcess, end_processes

SLEEPER = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
Start = Callable[[int], tuple[RankProcess, psutil.Process]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a rank's process."""
    started: list[subprocess.Popen[bytes]] = []

    def start(rank: int) -> tuple[RankProcess, psutil.Process]:
        started.append(subprocess.Popen(SLEEPER, stdout=subprocess.PIPE))
        output = started[-1].stdout
        assert output is not None
        output.readline()
        process = psutil.Process(started[-1].pid)
        return RankProcess(rank, "node", process.pid, process.create_time()), process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("with_stacks", [False, True])
def test_all_ranks_are_ended_a_stopped_one_too(start: Start, with_stacks: bool) -> None:
    ranks, processes = zip(*[start(rank) for rank in range(2)], strict=True)
    processes[1].suspend()
    assert end_processes(ranks, with_stacks) == []
    assert all(is_gone(process) for process in processes)


def test_a_process_that_has_got_the_number_of_a_rank_is_left_alone(start: Start) -> None:
    rank, process = start(0)
    earlier = RankProcess(0, "node", rank.pid, rank.created_s - 100.0)
    assert end_processes([earlier], with_stacks=True) == []
    assert not is_gone(process)


def test_a_rank_that_has_died_already_is_no_error(start: Start) -> None:
    rank, process = start(0)
    process.kill()
    assert end_processes([rank], with_stacks=True) == []


def test_what_cannot_be_ended_is_named(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that waits in a driver for a device that has died."""
    rank, _ = start(3)
    monkeypatch.setattr("octavo.cluster.fencing.os.kill", lambda pid, number: None)
    assert end_processes([rank], with_stacks=False, patience_s=0.05) == [3]
