"""An engine of this process behind the seam to a cluster, when it fails."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from scripted_cluster import deltas_of

from octavo.cluster.api.service import GenerationRequest
from octavo.cluster.offline.engine import LocalService
from octavo.worker.engine import Engine
from octavo.worker.engine_loop import EngineLoop
from octavo.worker.errors import Unavailable
from octavo.worker.grammar import GrammarCompiler
from octavo.worker.grammar_desk import GrammarDesk
from octavo.worker.messages import FinishReason, SamplingParams, SequenceUpdate
from octavo.worker.report_book import GroupIdentity, ReportBook
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.sampling_row import SamplingRow, StepResult
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.step_plan import StepPlan
from octavo.worker.step_thread import StepThread


class FailingModel:
    """Draws two tokens, and then fails."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._thread = StepThread("model")

    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        return self._thread.submit(lambda: self._run(rows))

    def heartbeat(self) -> None: ...

    def shut_down(self) -> None: ...

    def _run(self, rows: list[SamplingRow]) -> StepResult:
        self.num_steps += 1
        if self.num_steps > 2:
            raise RuntimeError("the device is gone")
        return StepResult([row.position for row in rows])


def failing_service() -> LocalService:
    model = FailingModel()

    def engine_of(emit: Callable[[str, SequenceUpdate], None]) -> Engine:
        scheduler = Scheduler(SchedulerLimits(64, 4, 8, 64, 64), RoutingHasher(bytes(16), 4))
        return Engine(scheduler, model, clock=lambda: 0.0, emit=emit)

    book = ReportBook(GroupIdentity("tiny", "local", 1, 4, 64, 8), lambda engine: "", ())
    desk = GrammarDesk(GrammarCompiler.of_model(Path(), 64))
    return LocalService(EngineLoop(engine_of, model, book, 1), desk, "tiny", 1)


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, "tiny", (1, 2, 3), SamplingParams(8, seed=0), num_branches=2)


async def test_a_request_learns_why_the_engine_failed_and_no_other_is_taken() -> None:
    service = failing_service()
    generation = await service.start(request("one"))
    ends = {delta.branch: delta async for delta in deltas_of(generation) if delta.finish_reason is not None}
    assert [end.finish_reason for end in ends.values()] == [FinishReason.ABORT] * 2
    assert "the device is gone" in (ends[0].error or "")
    assert "the device is gone" in (service.failure or "")
    assert not (await service.readiness()).ready
    with pytest.raises(Unavailable, match="the device is gone"):
        await service.start(request("two"))
    await service.close()
