"""A worker group without a model: each of its sequences has a token at each tick.

The leader is the real one, with its engine, scheduler and mailboxes; only what carries out its steps is not.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from ticks import next_tick, wait_s

from octavo.cluster import worker_group
from octavo.cluster.fake.words import words_of
from octavo.worker import rank
from octavo.worker.actor import Worker
from octavo.worker.checkpoint.store import resolve_model
from octavo.worker.collectives import SingleProcess
from octavo.worker.grammar import GrammarCompiler
from octavo.worker.rank import LoadedRank
from octavo.worker.sampling_row import SamplingRow, StepResult
from octavo.worker.step_plan import StepPlan

CONTEXT = 8_192
NUM_BLOCKS = 65_536


class PacedExecutor:
    """Takes the steps one after another, each until the next tick. ``token_ids``: of each tick, in turn."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._steps: queue.SimpleQueue[tuple[int, Future[StepResult]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ticks", daemon=True).start()

    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self._steps.put((len(rows), future))
        return future

    def heartbeat(self) -> None: ...

    def shut_down(self) -> None:
        self._steps.put(None)

    def _run(self) -> None:
        tick = 0
        while (step := self._steps.get()) is not None:
            num_rows, future = step
            tick = next_tick(tick)
            time.sleep(wait_s(tick))
            future.set_result(StepResult([self._token_ids[tick % len(self._token_ids)]] * num_rows))


class PacedWorker(Worker):
    async def load(self, host: str, port: int) -> dict[str, Any]:
        folder = resolve_model(self._spec.model, cache_dir=self._spec.cache_dir, report=lambda line: None).path
        token_ids = list(words_of(folder).values())
        rank.executor_of = lambda loaded: PacedExecutor(token_ids)  # type: ignore[assignment,return-value]
        nothing: Any = SimpleNamespace()
        compiler = GrammarCompiler.of_model(folder, vocab_size=len(token_ids))
        self._loaded = LoadedRank(nothing, SingleProcess(), nothing, NUM_BLOCKS, CONTEXT, nothing, compiler)
        return {"rank": 0, "num_blocks": NUM_BLOCKS, "max_model_len": CONTEXT, "ledger": "no model, no memory"}


class PacedGroup(worker_group.WorkerGroup):
    """The deployment, which makes its workers of that class."""

    def _create_workers(self) -> list[Any]:
        worker_group.Worker = PacedWorker  # type: ignore[misc]
        return super()._create_workers()
