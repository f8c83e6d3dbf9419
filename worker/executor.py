"""Executor: carries out step plans on all ranks of a worker group, from the leader's side.

Broadcast, forward pass and sampling run in one thread of the executor's own, so that the engine can plan a step while
the one before it runs. Heartbeats and the end go through the same thread: the ranks hear everything in order.

On a GPU that thread only launches: the next step's kernels are queued while those of this one run, and name its tokens
by row. A second thread waits for the tokens to reach the host. Rows whose state depends on the token before (see
``sampling_state.py``) make the first one wait for it too, when it has launched the forward pass: what they need is made
while that runs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.backend import Kernels
from .collectives import Collectives
from .host_copy import HostCopy
from .profiler import StepProfiler
from .prompt_reading import PromptReadings, ReadingsOnHost
from .sampler import Sampled, sample_rows
from .sampling_row import Candidate, SamplingRow, StepResult
from .sampling_state import RowEnd
from .step_plan import GraphKey, PlanKind, StepPlan, pack_plan
from .step_thread import EarlierFailure, StepThread
from .token_logprobs import LogprobsCopy, RowLogprobs

MAX_STEPS_UNDER_WAY = 2
"""One that runs and one that waits for it; the ranks remember the tokens of so many."""

STEPS_BETWEEN_CAPTURES = 16
"""Under load, steps go on for so long before the next graph is recorded: one takes the time of some ten of them."""

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """A rank's shard of the model with its KV blocks; see ``ModelRunner``."""

    def execute(self, plan: StepPlan) -> Tensor | None: ...

    def take_readings(self) -> PromptReadings: ...

    def remember(self, step: int, token_ids: Tensor) -> None: ...

    def next_graph(self, *, idle: bool) -> GraphKey | None: ...

    def capture(self, key: GraphKey, collectives: Collectives) -> None: ...


@dataclass(slots=True)
class _Drawn:
    """A step's tokens, of which the states have not heard yet."""

    token_ids: HostCopy
    rows: dict[int, SamplingRow]
    """Those whose states want to hear."""
    failed: AbstractSet[int]
    """Rows whose tokens mean nothing."""


class Executor:
    """Rank 0: broadcasts plans, takes part in them, and samples."""

    def __init__(
        self,
        runner: Runner,
        collectives: Collectives,
        kernels: Kernels,
        *,
        overlaps: bool = False,
        profiler: StepProfiler | None = None,
    ) -> None:
        """``overlaps``: the device computes on while the host does something else, as GPUs do."""
        self._runner = runner
        self._collectives = collectives
        self._kernels = kernels
        self._profiler = profiler
        self._thread = StepThread("steps")
        self._results = StepThread("results") if overlaps else None
        self._under_way: list[Future[StepResult]] = []
        self._steps_since_capture = 0
        self._drawn: _Drawn | None = None

    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        """Run one step on all ranks, after those launched before it; returns at once.

        The future raises what the step raised, RuntimeError when a rank does not answer; the group is then unusable and
        every later step fails too. Raises RuntimeError when two steps are under way, or after ``shut_down``.
        """
        self._under_way = [step for step in self._under_way if not step.done()]
        if len(self._under_way) >= MAX_STEPS_UNDER_WAY:
            raise RuntimeError(f"step {plan.step} was launched while {MAX_STEPS_UNDER_WAY} others were under way")
        step = self._submit(functools.partial(self._launch, plan, rows))
        self._under_way.append(step)
        return step

    def _submit(self, run: Callable[[], Callable[[], StepResult]]) -> Future[StepResult]:
        """``run`` launches a step, and gives what waits for its result."""
        if self._results is None:
            return self._thread.submit(lambda: run()())
        launched = self._thread.submit(run)
        return self._results.submit(lambda: launched.result()())

    def heartbeat(self) -> None:
        """Tell idle ranks that the leader lives; notices a dead rank. Waits for the steps under way.

        A group that is idle also has the time to record a graph.
        """
        self._after_steps(self._beat)

    def profile(self, number: int, num_steps: int) -> None:
        """Let all ranks record the next ``num_steps`` steps, 0: record no more. Returns at once.

        Raises RuntimeError after ``shut_down``.
        """
        self._thread.submit(functools.partial(self._profile, number, num_steps))

    def shut_down(self) -> None:
        """Let the other ranks return from ``follow``, and end the thread, after the steps under way.

        When a step has failed the ranks are not told: they may be in the middle of it. Harmless when repeated.
        """
        try:
            with contextlib.suppress(EarlierFailure):
                if self._thread.is_open:
                    self._after_steps(functools.partial(self._broadcast, StepPlan(PlanKind.SHUTDOWN)))
        finally:
            if self._results is not None:
                self._results.close()
            self._thread.close()

    def _after_steps(self, call: Callable[[], None]) -> None:
        """Carry out a call in the thread when all steps have given their results; none that has failed."""
        if self._results is not None:
            self._results.submit(lambda: None).result()
        self._thread.submit(call).result()

    # ---- in the thread ----

    def _beat(self) -> None:
        self._tell_states()  # an idle executor holds on to nothing
        self._broadcast(StepPlan(PlanKind.HEARTBEAT))
        self._capture(idle=True)

    def _capture(self, *, idle: bool) -> bool:
        """Let all ranks record a graph, if one is wanted; whether it was."""
        self._steps_since_capture = 0
        key = self._runner.next_graph(idle=idle)
        if key is not None:
            self._broadcast(StepPlan(PlanKind.CAPTURE, graph=key))
            self._runner.capture(key, self._collectives)
        return key is not None

    def _profile(self, number: int, num_steps: int) -> None:
        if self._profiler is not None:
            self._broadcast(StepPlan(PlanKind.PROFILE, step=num_steps, tokens_from_step=number))
            self._profiler.begin(number, num_steps)

    def _launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Callable[[], StepResult]:
        """Launch a step; what waits for its result."""
        if self._profiler is None or not self._profiler.is_recording:
            return self._launch_step(plan, rows)
        with self._profiler.step(plan.step):
            return functools.partial(_held_up, self._launch_step(plan, rows))

    def _launch_step(self, plan: StepPlan, rows: list[SamplingRow]) -> Callable[[], StepResult]:
        result = self._run(plan, rows)
        if not plan.reads_prompts:
            return result
        return functools.partial(_with_readings, result, ReadingsOnHost(plan, self._runner.take_readings()))

    def _run(self, plan: StepPlan, rows: list[SamplingRow]) -> Callable[[], StepResult]:
        was_held_up = self._steps_since_capture == STEPS_BETWEEN_CAPTURES and self._capture(idle=False)
        self._steps_since_capture += 1
        self._broadcast(plan)
        logits = self._runner.execute(plan)
        if logits is None:
            return lambda: StepResult([], was_held_up=was_held_up)
        if not rows:
            nothing = Sampled(logits.new_empty(0, dtype=torch.int64))
            held_up = functools.partial(_result, was_held_up=was_held_up)
            return functools.partial(held_up, HostCopy(nothing.token_ids), nothing, [], frozenset())
        sampled, failed = self._sample(logits, rows)
        if plan.share_sampled:
            # Also where rows failed: the other ranks wait for the tokens, and the next plan may name them.
            # -1, a row without a token, would be an index into the embedding there.
            shared = self._collectives.share_sampled(sampled.token_ids.clamp(min=0), len(rows), logits.device)
            self._runner.remember(plan.step, shared)
        token_ids = HostCopy(sampled.token_ids)
        logprobs = [LogprobsCopy(part) for part in sampled.logprobs]
        self._note_drawn(token_ids, rows, failed | sampled.ends.keys())
        return functools.partial(_result, token_ids, sampled, logprobs, failed, was_held_up=was_held_up)

    def _sample(self, logits: Tensor, rows: list[SamplingRow]) -> tuple[Sampled, frozenset[int]]:
        """The rows' tokens, and which rows could not be sampled: those have token 0."""
        if any(row.state is not None and row.state.needs_last_token for row in rows):
            self._tell_states()
        try:
            return sample_rows(logits, rows, self._kernels), frozenset()
        except Exception:  # what one request asks for must not end the others, nor the group
            logger.exception("a step's rows could not be sampled together")
            return self._sample_one_by_one(logits, rows)

    def _sample_one_by_one(self, logits: Tensor, rows: list[SamplingRow]) -> tuple[Sampled, frozenset[int]]:
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        candidates: dict[int, tuple[Candidate, ...]] = {}
        ends: dict[int, RowEnd] = {}
        logprobs: list[RowLogprobs] = []
        failed = set()
        for index, row in enumerate(rows):
            try:
                alone = sample_rows(logits[index : index + 1], [row], self._kernels)
            except Exception:
                logger.exception("a row could not be sampled: %s", row)
                failed.add(index)
                continue
            token_ids[index : index + 1] = alone.token_ids
            if alone.candidates:
                candidates[index] = alone.candidates[0]
            if alone.ends:
                ends[index] = alone.ends[0]
            logprobs += [replace(part, rows=[index]) for part in alone.logprobs]
        return Sampled(token_ids, candidates, ends, tuple(logprobs)), frozenset(failed)

    def _note_drawn(self, token_ids: HostCopy, rows: list[SamplingRow], failed: AbstractSet[int]) -> None:
        wanting = {index: row for index, row in enumerate(rows) if row.state is not None and row.state.needs_last_token}
        if wanting:
            self._drawn = _Drawn(token_ids, wanting, failed)

    def _tell_states(self) -> None:
        """Let the states know the tokens of the step before, as far as they wanted to; waits for those."""
        drawn, self._drawn = self._drawn, None
        if drawn is None:
            return
        tokens = drawn.token_ids.wait().tolist()
        for index, row in drawn.rows.items():
            _tell(row, None if index in drawn.failed or tokens[index] < 0 else tokens[index])

    def _broadcast(self, plan: StepPlan) -> None:
        if self._collectives.size > 1:
            self._collectives.broadcast_plan(pack_plan(plan))


def _tell(row: SamplingRow, token_id: int | None) -> None:
    if row.state is None:
        return
    if token_id is None:
        row.state.stop()
        return
    try:
        row.state.accept(row.position, token_id)
    except Exception:  # it is the end of this row's branch alone
        logger.exception("a row's token could not be taken in: %s", row)
        row.state.fail("the next token could not be sampled")


def _held_up(result: Callable[[], StepResult]) -> StepResult:
    """What a step gave whose time says nothing of others."""
    return replace(result(), was_held_up=True)


def _with_readings(result: Callable[[], StepResult], readings: ReadingsOnHost) -> StepResult:
    """What a step gave that also read prompts."""
    return replace(result(), prompt_logprobs=readings.scores(), hidden_sums=readings.sums())


def _result(
    token_ids: HostCopy, sampled: Sampled, logprobs: list[LogprobsCopy], failed: AbstractSet[int], *, was_held_up: bool
) -> StepResult:
    """What a step gave, when its tokens are on the host. -1 stands for a row of logits that were no numbers."""
    tokens: list[int | None] = token_ids.wait().tolist()
    told = {row: found for part in logprobs for row, found in part.wait().items()}
    nan_rows = frozenset(row for row, token in enumerate(tokens) if token == -1) - sampled.ends.keys()
    for row in (*failed, *nan_rows, *sampled.ends):
        tokens[row] = None
    return StepResult(tokens, sampled.candidates, nan_rows, sampled.ends, told, was_held_up)
