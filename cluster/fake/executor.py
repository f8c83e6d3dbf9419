"""FakeExecutor: carries out steps by waiting as long as they would take. Scheduler, block pool and prefix cache are the
real ones."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from ...router.simulator.step_times import StepTimes, shape_of
from ...worker.messages import TokenLogprobs
from ...worker.sampling_row import Candidate, SamplingRow, StepResult
from ...worker.step_plan import StepPlan

_CERTAIN = TokenLogprobs(0.0, 1)


class Clockwork:
    """Gives futures their results at their times, for all groups of a process, in one thread."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Future[StepResult], StepResult]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="clockwork", daemon=True).start()

    def at(self, due_s: float, result: StepResult) -> Future[StepResult]:
        """``due_s``: on the monotonic clock."""
        future: Future[StepResult] = Future()
        with self._changed:
            heapq.heappush(self._due, (due_s, next(self._numbers), future, result))
            if self._due[0][2] is future:
                self._changed.notify()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                wait_s = self._due[0][0] - time.monotonic() if self._due else None
                if wait_s is None or wait_s > 0.0:
                    self._changed.wait(wait_s)
                    continue
                _, _, future, result = heapq.heappop(self._due)
            future.set_result(result)


class FakeExecutor:
    """Of one group. ``words`` are the tokens that are drawn from, by the request's seed and the place in its output;
    what it wants of probabilities is answered as if each token had been certain. ``hidden_size``: of the vectors, all
    zeros, that embeddings are made of."""

    def __init__(self, clockwork: Clockwork, step_times: StepTimes, words: Sequence[int], hidden_size: int) -> None:
        self._clockwork = clockwork
        self._step_times = step_times
        self._words = words
        self._nothing = np.zeros(hidden_size, np.float32)
        self._free_s = 0.0
        """When the last step that was launched ends."""

    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        begin_s = max(time.monotonic(), self._free_s)
        self._free_s = begin_s + self._step_times.step_s(shape_of(plan))
        return self._clockwork.at(self._free_s, self._result(plan, rows))

    def heartbeat(self) -> None: ...

    def shut_down(self) -> None: ...

    def _result(self, plan: StepPlan, rows: list[SamplingRow]) -> StepResult:
        return StepResult(
            [self._word(row) for row in rows],
            candidates={index: self._candidates(row) for index, row in enumerate(rows) if row.num_candidates},
            logprobs={index: _CERTAIN for index, row in enumerate(rows) if row.num_logprobs is not None},
            prompt_logprobs=tuple((_CERTAIN,) * count for count in plan.scored[:, 1].tolist()),
            hidden_sums=(self._nothing,) * len(plan.pooled),
        )

    def _word(self, row: SamplingRow, rank: int = 0) -> int:
        return self._words[hash((row.seed, row.branch, row.position, rank)) % len(self._words)]

    def _candidates(self, row: SamplingRow) -> tuple[Candidate, ...]:
        return tuple((self._word(row, rank), -float(rank)) for rank in range(row.num_candidates))
