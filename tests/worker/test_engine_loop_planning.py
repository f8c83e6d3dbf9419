"""When the engine loop takes calls and when it lets the engine plan, with an engine whose steps a test starts and ends;
and how many requests it lets wait."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.worker.admission import Bound
from octavo.worker.engine_loop import EngineLoop
from octavo.worker.messages import FinishReason, Request, SamplingParams, SequenceUpdate
from octavo.worker.report_book import GroupIdentity, ReportBook
from octavo.worker.sampling_row import StepResult
from octavo.worker.speed import SpeedMeter

LONG_S = 60.0
"""Longer than any test takes: what waits for so long did not end by its time limit."""

Emit = Callable[[str, SequenceUpdate], None]


class ScriptedEngine:
    """Each step computes the requests that came before it, and ends them. A test decides when a step is done, and how
    long planning the next one is not worth it."""

    def __init__(self) -> None:
        self.in_flight: Future[StepResult] | None = None
        self.plan_after_s = LONG_S
        self.plan_at_s = 0.0
        self.planned: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        """The requests of each step, when it is launched."""
        self.under_way: queue.SimpleQueue[Future[StepResult]] = queue.SimpleQueue()
        self.num_calls_of_step = 0
        self.admits = True
        """False: requests stay in the queue."""
        self.aborted: list[tuple[str, int | None]] = []
        self.emit: Emit = lambda gateway_id, update: None
        self.speed = SpeedMeter()
        self.num_prefill_tokens_under_way = 0
        self._waiting: dict[str, Request] = {}
        self._running: list[Request] = []

    # ---- what the test does ----

    def end_steps(self, failure: Exception | None = None) -> None:
        """Those under way: the one in flight, and the one before it that ``step`` may be waiting for."""
        while not self.under_way.empty():
            step = self.under_way.get()
            if failure:
                step.set_exception(failure)
            else:
                step.set_result(StepResult([]))

    async def next_plan(self) -> list[str]:
        return await asyncio.to_thread(self.planned.get, timeout=LONG_S)

    # ---- what the loop uses ----

    def submit(self, request: Request) -> None:
        self._waiting[request.request_id] = request

    def abort(self, request_id: str, *, branch: int | None = None) -> None:
        self.aborted.append((request_id, branch))
        if request := self._waiting.pop(request_id, None):
            self._end(request, FinishReason.ABORT)

    def abort_gateway(self, gateway_id: str) -> None: ...

    def step(self) -> bool:
        self.num_calls_of_step += 1
        before, ended = self.in_flight, self._running
        self.in_flight, self._running = None, []
        if self._waiting and self.admits:
            self._running, self._waiting = list(self._waiting.values()), {}
            self.in_flight = Future()
            self.under_way.put(self.in_flight)
            self.plan_at_s = time.monotonic() + self.plan_after_s
            self.planned.put([request.request_id for request in self._running])
        if before is not None:
            before.result(LONG_S)
            for request in ended:
                self._end(request, FinishReason.LENGTH)
        return self.in_flight is not None or before is not None

    def _end(self, request: Request, reason: FinishReason) -> None:
        self.emit(request.gateway_id, SequenceUpdate(request.request_id, 0, 0, (1,), reason, None))

    @property
    def has_work(self) -> bool:
        return self.admits and bool(self._waiting or self._running)

    largest_step_s = 0.0

    @property
    def num_requests(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def scheduler(self) -> Any:
        num_tokens = sum(len(request.prompt_token_ids) for request in self._waiting.values())
        return SimpleNamespace(
            num_queued_requests=len(self._waiting),
            num_queued_tokens=num_tokens,
            num_uncomputed_prompt_tokens=num_tokens,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_coming_blocks=0,
            num_free_slots=0,
            limits=SimpleNamespace(block_size=16),
            drain_events=tuple,
        )

    def drain_progress(self) -> tuple[()]:
        return ()


class Heart:
    def __init__(self) -> None:
        self.num_beats = 0
        self.is_shut_down = threading.Event()

    def heartbeat(self) -> None:
        self.num_beats += 1

    def shut_down(self) -> None:
        self.is_shut_down.set()


class Bench:
    def __init__(self, *, heartbeat_s: float = 0.02, **bounds: int) -> None:
        self.engine = ScriptedEngine()
        self.heart = Heart()
        book = ReportBook(GroupIdentity("model", "group", 1, 4, 512, 8), lambda engine: "", ())
        self.loop = EngineLoop(self._engine_of, self.heart, book, 1, heartbeat_s=heartbeat_s, **bounds)

    def _engine_of(self, emit: Emit) -> Any:
        self.engine.emit = emit
        return self.engine

    async def step_with(self, *names: str) -> None:
        """A step with these requests is in flight."""
        for name in names:
            self.loop.submit(request(name))
        assert await self.engine.next_plan() == list(names)

    async def taken(self) -> None:
        """The engine has taken all calls so far."""
        await self.loop.ask(lambda engine: None)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.engine.end_steps()
    bench.loop.stop(LONG_S)


def request(name: str = "r", *, gateway: str = "g", num_tokens: int = 3) -> Request:
    return Request(name, gateway, "model", (1,) * num_tokens, b"", SamplingParams(max_tokens=1, seed=0))


# ---- while a step runs ----


async def test_requests_that_come_while_a_step_runs_are_in_the_next_plan(bench: Bench) -> None:
    await bench.step_with("a")
    for name in ("b", "c", "d"):
        bench.loop.submit(request(name))
        await bench.taken()
    assert bench.engine.planned.empty()
    bench.engine.end_steps()
    assert await bench.engine.next_plan() == ["b", "c", "d"]


async def test_the_next_step_is_planned_when_its_time_has_come_though_one_is_in_flight(bench: Bench) -> None:
    bench.engine.plan_after_s = 0.03
    await bench.step_with("a")
    first = bench.engine.in_flight
    bench.loop.submit(request("b"))
    assert await bench.engine.next_plan() == ["b"]
    assert first is not None
    assert not first.done()


async def test_calls_without_end_do_not_put_planning_off(bench: Bench) -> None:
    bench.engine.plan_after_s = 0.05
    await bench.step_with("a")
    first = bench.engine.in_flight
    bench.loop.submit(request("b"))
    while bench.engine.planned.empty():
        await asyncio.wait([asyncio.ensure_future(bench.taken())], timeout=0.05)
    assert first is not None
    assert not first.done()


async def test_an_abort_is_carried_out_while_a_step_runs(bench: Bench) -> None:
    await bench.step_with("a")
    bench.loop.submit(request("b"))
    bench.loop.abort(("b",))
    bench.loop.abort(("c", "d"), branch=3)
    frame = await bench.loop.poll("g", 0, LONG_S)
    assert [(update.request_id, update.finish_reason) for update in frame.updates] == [("b", FinishReason.ABORT)]
    await bench.taken()
    assert bench.engine.aborted == [("b", None), ("c", 3), ("d", 3)]


async def test_tokens_are_there_as_soon_as_the_engine_has_taken_the_step_in(bench: Bench) -> None:
    """All of a step together; the one after it is in flight already."""
    bench.engine.admits = False
    for name in ("a", "b"):
        bench.loop.submit(request(name))
    await bench.loop.ask(lambda engine: setattr(engine, "admits", True))
    assert await bench.engine.next_plan() == ["a", "b"]
    bench.loop.submit(request("c"))
    await bench.taken()
    bench.engine.end_steps()
    frame = await bench.loop.poll("g", 0, LONG_S)
    assert [update.request_id for update in frame.updates] == ["a", "b"]
    assert await bench.engine.next_plan() == ["c"]


async def test_no_heartbeat_waits_behind_a_step(bench: Bench) -> None:
    await bench.step_with("a")
    beats = bench.heart.num_beats
    await asyncio.to_thread(threading.Event().wait, 0.1)  # the absence of something cannot be awaited
    assert bench.heart.num_beats == beats


async def test_an_idle_loop_waits() -> None:
    bench = Bench(heartbeat_s=LONG_S)
    for _ in range(20):
        await bench.taken()
    assert bench.engine.num_calls_of_step == 1
    bench.loop.stop(LONG_S)


# ---- the end ----


async def test_a_step_in_flight_is_waited_for_before_the_ranks_are_let_go(bench: Bench) -> None:
    await bench.step_with("a")
    stopping = asyncio.create_task(asyncio.to_thread(bench.loop.stop, LONG_S))
    assert not await asyncio.to_thread(bench.heart.is_shut_down.wait, 0.05)
    bench.engine.end_steps()
    await stopping
    assert bench.heart.is_shut_down.is_set()
    assert bench.engine.planned.empty()


async def test_a_step_that_fails_ends_the_loop_and_lets_the_ranks_go(bench: Bench) -> None:
    await bench.step_with("a")
    failure = ValueError("a rank is gone")
    bench.engine.end_steps(failure)
    assert await bench.loop.failed() is failure
    assert await asyncio.to_thread(bench.heart.is_shut_down.wait, LONG_S)


# ---- how much may wait ----


async def test_a_request_too_many_is_refused_at_once() -> None:
    bench = Bench(max_queued_requests=2)
    bench.engine.admits = False
    assert [bench.loop.submit(request(name)) for name in "ab"] == [None, None]
    refusal = bench.loop.submit(request("c"))
    assert refusal is not None
    assert refusal.message == "--max-queued-requests is 2 and 2 requests wait"
    await bench.taken()
    assert bench.loop.submit(request("d")) is not None
    bench.loop.abort(("a",))
    await bench.taken()
    assert bench.loop.submit(request("e")) is None
    await bench.loop.ask(lambda engine: setattr(engine, "admits", True))
    assert await bench.engine.next_plan() == ["b", "e"]
    assert bench.loop.num_refused == {Bound.REQUESTS: 2, Bound.TOKENS: 0}
    bench.engine.end_steps()
    bench.loop.stop(LONG_S)


async def test_what_was_admitted_makes_room() -> None:
    bench = Bench(max_queued_tokens=10)
    for name in "abc":  # each longer than the bound, when nothing waits
        assert bench.loop.submit(request(name, num_tokens=11)) is None
        assert await bench.engine.next_plan() == [name]
        await bench.taken()
        bench.engine.end_steps()
    assert (await bench.loop.poll("g", 0, LONG_S)).updates
    await bench.taken()
    bench.loop.stop(LONG_S)


async def test_after_any_mix_of_requests_nothing_is_counted_as_waiting() -> None:
    bench = Bench(max_queued_requests=5, max_queued_tokens=60)
    bench.engine.plan_after_s = 0.0
    chance, let_in, refused = random.Random(5), 0, 0
    for number in range(3_000):
        if bench.loop.submit(request(str(number), num_tokens=chance.randint(1, 40))) is None:
            let_in += 1
        else:
            refused += 1
        if chance.random() < 0.3:
            bench.loop.abort((str(chance.randint(0, number)),))
        if chance.random() < 0.5:
            bench.engine.end_steps()
        if chance.random() < 0.1:
            await asyncio.sleep(0)
    acknowledged, ended = 0, 0
    while ended < let_in:
        bench.engine.end_steps()
        frame = await bench.loop.poll("g", acknowledged, 0.01)
        ended += len(frame.updates)
        acknowledged = frame.last_number
    await bench.taken()
    assert refused > 0
    assert sum(bench.loop.num_refused.values()) == refused
    admission = bench.loop._admission
    assert (admission.num_queued_requests, admission.num_queued_tokens) == (0, 0)
    bench.loop.stop(LONG_S)
