"""The engine loop: a thread that computes, an event loop that asks, and nobody left waiting when either ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

import pytest

from octavo.worker.engine import Engine
from octavo.worker.engine_loop import EngineLoop
from octavo.worker.messages import FinishReason, Request, SamplingParams, SequenceUpdate, TokenFrame
from octavo.worker.metrics import metrics_text
from octavo.worker.report_book import GroupIdentity, ReportBook
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.sampling_row import SamplingRow, StepResult
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.step_plan import StepPlan
from octavo.worker.step_thread import StepThread
from octavo.worker.step_watch import FIRST_DEADLINE_S, FIRST_STEPS, LEAST_DEADLINE_S

GENERATION = 17
LONG_S = 60.0
"""Longer than any test takes: what waits for so long did not end by its time limit."""


class Model:
    """Draws its output position, in a thread of its own; a test can hold its steps up, or let them fail."""

    def __init__(self) -> None:
        self.may_step = threading.Event()
        self.may_step.set()
        self.stepping = threading.Event()
        self.failure: Exception | None = None
        self._thread = StepThread("model")

    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        return self._thread.submit(functools.partial(self._run, rows))

    def _run(self, rows: list[SamplingRow]) -> StepResult:
        self.stepping.set()
        self.may_step.wait(LONG_S)
        if self.failure:
            raise self.failure
        return StepResult([row.position for row in rows])


class Heart:
    """Counts beats; a beat can fail, as it does when a rank is gone."""

    def __init__(self) -> None:
        self.num_beats = 0
        self.is_shut_down = False
        self.failure: Exception | None = None
        self.beaten = threading.Semaphore(0)

    def heartbeat(self) -> None:
        if self.failure:
            raise self.failure
        self.num_beats += 1
        self.beaten.release()

    def shut_down(self) -> None:
        self.is_shut_down = True


class Bench:
    def __init__(self, *, heartbeat_s: float = 0.02, gateway_silence_s: float = LONG_S) -> None:
        self.model = Model()
        self.heart = Heart()
        identity = GroupIdentity("model", "group", GENERATION, 4, 512, 8)
        self.loop = EngineLoop(
            self._engine,
            self.heart,
            ReportBook(identity, lambda engine: metrics_text(engine, "model", "group", {}), ("router",)),
            GENERATION,
            heartbeat_s=heartbeat_s,
            gateway_silence_s=gateway_silence_s,
        )

    def _engine(self, emit: Callable[[str, SequenceUpdate], None]) -> Engine:
        scheduler = Scheduler(SchedulerLimits(512, 4, 8, 64, 2_048), RoutingHasher(bytes(16), 4))
        return Engine(scheduler, self.model, clock=time.monotonic, emit=emit)

    async def collect(self, gateway_id: str, *, num_ends: int = 1) -> list[SequenceUpdate]:
        """Poll as a gateway does, until so many branches have ended and that is acknowledged."""
        updates: list[SequenceUpdate] = []
        acknowledged = 0
        while sum(update.finish_reason is not None for update in updates) < num_ends:
            frame = await self.loop.poll(gateway_id, acknowledged, LONG_S)
            assert frame.generation == GENERATION
            acknowledged = frame.last_number
            updates += frame.updates
        await self.loop.poll(gateway_id, acknowledged, 0.0)
        return updates

    async def stepping(self) -> None:
        """Wait until a step is under way."""
        assert await asyncio.to_thread(self.model.stepping.wait, LONG_S)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.model.may_step.set()
    bench.loop.stop(LONG_S)


def request(name: str = "r", *, gateway: str = "g", max_tokens: int = 3) -> Request:
    return Request(name, gateway, "model", (1, 2, 3), b"", SamplingParams(max_tokens=max_tokens, seed=0))


# ---- tokens ----


async def test_tokens_of_a_request_come_by_polls(bench: Bench) -> None:
    bench.loop.submit(request())
    updates = await bench.collect("g")
    assert [token for update in updates for token in update.token_ids] == [0, 1, 2]
    assert updates[-1].finish_reason is FinishReason.LENGTH


async def test_gateways_get_their_own_tokens(bench: Bench) -> None:
    for gateway in ("a", "b"):
        for index in range(4):
            bench.loop.submit(request(f"{gateway}{index}", gateway=gateway, max_tokens=5))
    got = await asyncio.gather(bench.collect("a", num_ends=4), bench.collect("b", num_ends=4))
    for gateway, updates in zip("ab", got, strict=True):
        assert {update.request_id for update in updates} == {f"{gateway}{index}" for index in range(4)}


async def test_a_poll_waits_for_news(bench: Bench) -> None:
    poll = asyncio.create_task(bench.loop.poll("g", 0, LONG_S))
    await asyncio.sleep(0)
    assert not poll.done()
    bench.loop.submit(request())
    assert (await poll).updates


async def test_a_poll_without_news_is_answered_in_time(bench: Bench) -> None:
    assert await bench.loop.poll("g", 0, 0.01) == TokenFrame(GENERATION, 0, ())


async def test_a_lost_answer_is_repeated_exactly(bench: Bench) -> None:
    bench.loop.submit(request())
    await bench.loop.drained(0.01)
    first = await bench.loop.poll("g", 0, LONG_S)
    while first.updates[-1].finish_reason is None:
        first = await bench.loop.poll("g", 0, LONG_S)
    assert await bench.loop.poll("g", 0, LONG_S) == first


async def test_an_abort_ends_a_request_in_the_middle(bench: Bench) -> None:
    bench.model.may_step.clear()
    bench.loop.submit(request(max_tokens=1_000))
    await bench.stepping()
    bench.loop.abort(("r", "unknown"))
    bench.model.may_step.set()
    updates = await bench.collect("g")
    assert updates[-1].finish_reason is FinishReason.ABORT
    assert await bench.loop.ask(lambda engine: engine.scheduler.pool.num_free_blocks) == 512


# ---- idle ----


async def test_an_idle_engine_beats(bench: Bench) -> None:
    for _ in range(3):
        assert await asyncio.to_thread(bench.heart.beaten.acquire, timeout=LONG_S)


async def test_it_beats_though_it_is_asked_all_the_time(bench: Bench) -> None:
    while bench.heart.num_beats < 3:
        await bench.loop.ask(lambda engine: None)


async def test_a_rank_that_died_while_nothing_was_to_do_is_noticed(bench: Bench) -> None:
    bench.heart.failure = RuntimeError("rank 1 is gone")
    assert str(await asyncio.wait_for(bench.loop.failed(), LONG_S)) == "rank 1 is gone"


async def test_the_age_of_the_heartbeat_grows_while_a_step_hangs(bench: Bench) -> None:
    bench.model.may_step.clear()
    bench.loop.submit(request())
    await bench.stepping()
    first = bench.loop.heartbeat_age_s
    assert bench.loop.heartbeat_age_s >= first >= 0.0


# ---- gateways that fall silent ----


async def test_the_deadline_of_a_step_comes_down_when_steps_are_known(bench: Bench) -> None:
    assert bench.loop.step_deadline_s == FIRST_DEADLINE_S
    bench.loop.submit(request(max_tokens=FIRST_STEPS + 1))
    await bench.collect("g")
    assert bench.loop.step_deadline_s == LEAST_DEADLINE_S


async def test_a_gateway_that_does_not_poll_is_dropped_with_its_requests() -> None:
    bench = Bench(gateway_silence_s=0.05)
    try:
        bench.model.may_step.clear()
        bench.loop.submit(request("silent's", gateway="silent", max_tokens=2_000))
        await bench.stepping()
        await asyncio.to_thread(threading.Event().wait, 0.1)  # silence cannot be awaited
        bench.model.may_step.set()
        bench.loop.submit(request("other's", gateway="other"))
        updates = await bench.collect("other")
        assert updates[-1].finish_reason is FinishReason.LENGTH
        assert await bench.loop.ask(lambda engine: engine.num_requests) == 0
        # Should it come back, it learns what became of its request.
        updates = await bench.collect("silent")
        assert updates[-1].finish_reason is FinishReason.ABORT
    finally:
        bench.loop.stop(LONG_S)


async def test_a_gateway_whose_mailbox_was_forgotten_is_told_so_at_once() -> None:
    bench = Bench(gateway_silence_s=0.05)
    try:
        bench.loop.submit(request())
        frame = await bench.loop.poll("g", 0, LONG_S)
        acknowledged, silence_s = frame.last_number, 0.1
        while frame.last_number >= acknowledged:  # silent for longer and longer
            await asyncio.to_thread(threading.Event().wait, silence_s)
            silence_s *= 2
            frame = await bench.loop.poll("g", acknowledged, 0.0)
        assert frame.updates == ()
    finally:
        bench.loop.stop(LONG_S)


async def test_a_poll_that_waits_is_a_sign_of_life() -> None:
    """It is answered before its gateway would count as silent, however long it wants to wait."""
    bench = Bench(gateway_silence_s=0.3)
    try:
        assert (await bench.loop.poll("g", 0, 1e6)).updates == ()
    finally:
        bench.loop.stop(LONG_S)


# ---- the end ----


async def test_when_the_engine_fails_everybody_waiting_learns_of_it(bench: Bench) -> None:
    bench.model.may_step.clear()
    bench.loop.submit(request())
    await bench.stepping()
    waiting = [
        asyncio.create_task(bench.loop.poll("g", 0, LONG_S)),
        asyncio.create_task(bench.loop.poll("another", 0, LONG_S)),
        asyncio.create_task(bench.loop.ask(lambda engine: engine.num_requests)),
        asyncio.create_task(bench.loop.drained(LONG_S)),
    ]
    await asyncio.sleep(0)
    bench.model.failure = ValueError("a rank is gone")
    bench.model.may_step.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(result) for result in results] == ["the engine failed: a rank is gone"] * 4
    assert await bench.loop.failed() is bench.model.failure
    with pytest.raises(RuntimeError, match="a rank is gone"):
        bench.loop.submit(request("late"))
    with pytest.raises(RuntimeError, match="a rank is gone"):
        await bench.loop.poll("g", 0, LONG_S)
    with pytest.raises(RuntimeError, match="a rank is gone"):
        await bench.loop.ask(lambda engine: None)


async def test_stopping_lets_the_ranks_go_and_is_no_failure(bench: Bench) -> None:
    poll = asyncio.create_task(bench.loop.poll("g", 0, LONG_S))
    failed = asyncio.create_task(bench.loop.failed())
    await asyncio.sleep(0)
    await asyncio.to_thread(bench.loop.stop, LONG_S)
    with pytest.raises(RuntimeError, match="the engine was stopped"):
        await poll
    assert bench.heart.is_shut_down
    assert not failed.done()
    failed.cancel()
    with pytest.raises(RuntimeError, match="the engine was stopped"):
        bench.loop.submit(request())


async def test_it_has_drained_when_the_last_tokens_are_acknowledged(bench: Bench) -> None:
    assert await bench.loop.drained(LONG_S)
    bench.loop.submit(request())
    assert not await bench.loop.drained(0.01)
    drained = asyncio.create_task(bench.loop.drained(LONG_S))
    await bench.collect("g")
    assert await drained


async def test_it_has_not_drained_before_what_was_let_in_has_come(bench: Bench) -> None:
    assert bench.loop.let_in(request()) is None
    assert not await bench.loop.drained(0.01)
    bench.loop.take(request())
    await bench.collect("g")
    assert await bench.loop.drained(LONG_S)


# ---- questions ----


async def test_an_answer_comes_from_between_two_steps(bench: Bench) -> None:
    bench.loop.submit(request())
    assert await bench.loop.ask(lambda engine: engine.num_requests) in (0, 1)
    with pytest.raises(KeyError, match="no"):
        await bench.loop.ask(lambda engine: engine.counters.finished["no"])  # type: ignore[index]
    assert await bench.collect("g")


async def test_who_stops_waiting_for_an_answer_does_no_harm(bench: Bench) -> None:
    bench.model.may_step.clear()
    bench.loop.submit(request())
    await bench.stepping()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(bench.loop.ask(lambda engine: 1), 0.01)
    bench.model.may_step.set()
    assert (await bench.collect("g"))[-1].finish_reason is FinishReason.LENGTH


# ---- reports ----


async def test_reports_tell_what_happened_until_they_arrive(bench: Bench) -> None:
    bench.loop.submit(request())
    await bench.collect("g")
    await bench.loop.ask(lambda engine: None)
    assert bench.loop.has_news("router")
    assert bench.loop.has_urgent_news("router")
    report = bench.loop.take_report("router")
    (progress,) = report.progress
    assert (progress.request_id, progress.prefilled, progress.finished) == ("r", True, True)
    assert report.metrics
    bench.loop.report_arrived("router", report, wants_snapshot=False)
    assert not bench.loop.has_news("router")
    assert not bench.loop.has_urgent_news("router")
    bench.loop.report_arrived("router", report, wants_snapshot=True)
    await bench.loop.ask(lambda engine: None)
    (message,) = bench.loop.take_report("router").events
    assert message.is_snapshot
    bench.loop.render_metrics()
    await bench.loop.ask(lambda engine: None)
    await bench.loop.ask(lambda engine: None)
    assert bench.loop.take_report("router").metrics


async def test_the_cache_is_walked_once_for_a_router_that_asks_for_a_snapshot_in_every_answer(bench: Bench) -> None:
    num_walks = 0

    def walk(engine: Engine) -> None:
        cache, snapshot = engine.scheduler.cache, engine.scheduler.cache.snapshot

        def counted() -> Any:
            nonlocal num_walks
            num_walks += 1
            return snapshot()

        cache.snapshot = counted  # type: ignore[method-assign]
        for _ in range(5):
            bench.loop.report_arrived("router", bench.loop.take_report("router"), wants_snapshot=True)

    await bench.loop.ask(walk)
    await bench.loop.ask(lambda engine: None)
    assert num_walks == 1
    bench.loop.report_arrived("router", bench.loop.take_report("router"), wants_snapshot=True)
    await bench.loop.ask(lambda engine: None)
    assert num_walks == 2


# ---- the prefix cache ----


async def test_the_prefix_cache_is_reset_between_two_steps(bench: Bench) -> None:
    bench.loop.submit(request(max_tokens=9))
    await bench.collect("g")
    assert await bench.loop.ask(lambda engine: engine.reset_prefix_cache()) == 2
    assert await bench.loop.ask(lambda engine: engine.reset_prefix_cache()) == 0


async def test_draining_is_reported(bench: Bench) -> None:
    bench.loop.set_draining()
    assert bench.loop.take_report("router").draining
