"""A torch profile of the next steps: the same steps on all ranks, as many as were asked for, one profile at a time."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.backend import reference_kernels
from octavo.worker.collectives import SingleProcess
from octavo.worker.executor import Executor
from octavo.worker.model_runner import follow
from octavo.worker.profile_desk import ProfileDesk
from octavo.worker.profiler import StepProfiler
from octavo.worker.step_plan import Int32Array, PlanKind, StepPlan, pack_plan

CPU = torch.device("cpu")


class Runner:
    """Computes something, which a trace then shows."""

    def execute(self, plan: StepPlan) -> Tensor | None:
        torch.ones(4).cumsum(0)
        return None

    def next_graph(self, *, idle: bool) -> None: ...


class Leader(SingleProcess):
    """Keeps what the leader tells its ranks, and tells it again."""

    size = 2

    def __init__(self) -> None:
        self.told: list[Int32Array] = []

    def broadcast_plan(self, buffer: Int32Array | None) -> Int32Array:
        if buffer is None:
            return self.told.pop(0)
        self.told.append(buffer)
        return buffer


def steps_in(trace: Path) -> list[int]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {event["name"] for event in events if event.get("ph") == "X"}
    assert "aten::cumsum" in names
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"octavo step (\d+)", name)))


@pytest.fixture
def ranks() -> Leader:
    return Leader()


@pytest.fixture
def profiler(tmp_path: Path) -> StepProfiler:
    return StepProfiler(tmp_path, "group-1", 0, CPU)


@pytest.fixture
def executor(ranks: Leader, profiler: StepProfiler) -> Iterator[Executor]:
    executor = Executor(Runner(), ranks, reference_kernels(), profiler=profiler)  # type: ignore[arg-type]
    yield executor
    executor.shut_down()


def run(executor: Executor, *numbers: int) -> list[bool]:
    """Steps of these numbers; which of them say nothing of the speed of others."""
    return [executor.launch(StepPlan(PlanKind.STEP, step=n), []).result(20).was_held_up for n in numbers]


def test_all_ranks_record_the_same_steps(
    executor: Executor, ranks: Leader, profiler: StepProfiler, tmp_path: Path
) -> None:
    done = profiler.expect()
    run(executor, 1)
    executor.profile(1, 2)
    assert run(executor, 2, 3, 4) == [True, True, False]
    assert done.result(60) == (2, "")
    assert steps_in(tmp_path / "group-1-1-rank0.json.gz") == [2, 3]

    ranks.told.append(pack_plan(StepPlan(PlanKind.SHUTDOWN)))
    other = StepProfiler(tmp_path, "group-1", 1, CPU)
    written = other.expect()
    follow(Runner(), ranks, profiler=other)  # type: ignore[arg-type]
    assert written.result(60) == (2, "")
    assert steps_in(tmp_path / "group-1-1-rank1.json.gz") == [2, 3]


def test_what_goes_wrong_with_a_trace_does_not_end_the_rank(executor: Executor, tmp_path: Path) -> None:
    profiler = executor._profiler
    assert profiler is not None
    (tmp_path / "file").touch()
    profiler._folder = tmp_path / "file" / "below"
    done = profiler.expect()
    executor.profile(1, 1)
    run(executor, 1, 2)
    num_steps, failure = done.result(60)
    assert num_steps == 1
    assert "could not be written" in failure


class Recorder:
    """Both sides of a desk: what it orders, and what is told of it when the test says so."""

    def __init__(self, num_recorded: int = 4) -> None:
        self.num_recorded = num_recorded
        self.orders: list[tuple[int, int]] = []
        self.done: Future[tuple[int, str]] = Future()

    def profile(self, number: int, num_steps: int) -> None:
        self.orders.append((number, num_steps))
        if num_steps == 0:
            self.done.set_result((self.num_recorded, ""))

    def expect(self) -> Future[tuple[int, str]]:
        self.done = Future()
        return self.done


def a_desk(recorder: Recorder) -> ProfileDesk:
    return ProfileDesk(recorder, recorder, Path("traces"), "group-1", 2)


async def test_a_desk_says_where_every_rank_s_trace_is() -> None:
    recorder = Recorder()
    asked = asyncio.create_task(a_desk(recorder).record(7, 30.0))
    await asyncio.sleep(0)
    recorder.done.set_result((7, ""))
    files = {"0": "traces/group-1-1-rank0.json.gz", "1": "traces/group-1-1-rank1.json.gz"}
    assert await asked == {"steps": 7, "files": files}


async def test_an_idle_group_s_profile_ends_with_the_steps_that_there_were() -> None:
    recorder = Recorder()
    assert (await a_desk(recorder).record(7, 0.01))["steps"] == 4
    assert recorder.orders == [(1, 7), (1, 0)]


async def test_without_a_step_there_is_no_trace() -> None:
    assert await a_desk(Recorder(num_recorded=0)).record(7, 0.01) == {"steps": 0, "files": {}}


async def test_there_is_one_profile_at_a_time() -> None:
    recorder = Recorder()
    desk = a_desk(recorder)
    first = asyncio.create_task(desk.record(7, 30.0))
    await asyncio.sleep(0)
    second: dict[str, Any] = await desk.record(1, 30.0)
    assert second["is_busy"]
    recorder.done.set_result((7, ""))
    assert (await first)["steps"] == 7
    assert (await desk.record(1, 0.01))["steps"] == 4, "and then another one"


@pytest.mark.parametrize("num_steps", [0, -1, 201])
async def test_too_many_steps_are_refused_with_the_limit(num_steps: int) -> None:
    assert "from 1 to 200" in (await a_desk(Recorder()).record(num_steps, 1.0))["error"]
