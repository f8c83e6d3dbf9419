"""Executor: carries out step plans on all ranks of a worker group, from the leader's side.

Broadcast, forward pass and sampling run in one thread of the executor's own, so that the engine can plan a step while
the one before it runs. Heartbeats and the end go through the same thread: the ranks hear everything in order.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.backend import Kernels
from .collectives import Collectives
from .sampler import Sampled, sample_rows
from .sampling_row import Candidate, SamplingRow, StepResult
from .step_plan import PlanKind, StepPlan, pack_plan
from .step_thread import EarlierFailure, StepThread

MAX_STEPS_UNDER_WAY = 2
"""One that runs and one that waits for it; the ranks remember the tokens of so many."""

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """A rank's shard of the model with its KV blocks; see ``ModelRunner``."""

    def execute(self, plan: StepPlan) -> Tensor | None: ...

    def remember(self, step: int, token_ids: Tensor) -> None: ...


class Executor:
    """Rank 0: broadcasts plans, takes part in them, and samples."""

    def __init__(self, runner: Runner, collectives: Collectives, kernels: Kernels) -> None:
        self._runner = runner
        self._collectives = collectives
        self._kernels = kernels
        self._thread = StepThread("steps")
        self._under_way: list[Future[StepResult]] = []

    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        """Run one step on all ranks, after those launched before it; returns at once.

        The future raises what the step raised, RuntimeError when a rank does not answer; the group is then unusable and
        every later step fails too. Raises RuntimeError when two steps are under way, or after ``shut_down``.
        """
        self._under_way = [step for step in self._under_way if not step.done()]
        if len(self._under_way) >= MAX_STEPS_UNDER_WAY:
            raise RuntimeError(f"step {plan.step} was launched while {MAX_STEPS_UNDER_WAY} others were under way")
        step = self._thread.submit(functools.partial(self._run, plan, rows))
        self._under_way.append(step)
        return step

    def heartbeat(self) -> None:
        """Tell idle ranks that the leader lives; notices a dead rank. Waits for the steps under way."""
        self._thread.submit(functools.partial(self._broadcast, StepPlan(PlanKind.HEARTBEAT))).result()

    def shut_down(self) -> None:
        """Let the other ranks return from ``follow``, and end the thread, after the steps under way.

        When a step has failed the ranks are not told: they may be in the middle of it. Harmless when repeated.
        """
        try:
            with contextlib.suppress(EarlierFailure):
                if self._thread.is_open:
                    self._thread.submit(functools.partial(self._broadcast, StepPlan(PlanKind.SHUTDOWN))).result()
        finally:
            self._thread.close()

    # ---- in the thread ----

    def _run(self, plan: StepPlan, rows: list[SamplingRow]) -> StepResult:
        self._broadcast(plan)
        logits = self._runner.execute(plan)
        if logits is None or not rows:
            return StepResult([])
        sampled, failed = self._sample(logits, rows)
        if plan.share_sampled:
            # Also where rows failed: the other ranks wait for the tokens, and the next plan may name them.
            shared = self._collectives.share_sampled(sampled.token_ids, len(rows), logits.device)
            self._runner.remember(plan.step, shared)
        token_ids: list[int | None] = sampled.token_ids.tolist()  # one copy from the device, not one a token
        for row in failed:
            token_ids[row] = None
        return StepResult(token_ids, sampled.candidates)

    def _sample(self, logits: Tensor, rows: list[SamplingRow]) -> tuple[Sampled, list[int]]:
        """The rows' tokens, and which rows could not be sampled: those have token 0."""
        try:
            return sample_rows(logits, rows, self._kernels), []
        except Exception:  # what one request asks for must not end the others, nor the group
            logger.exception("a step's rows could not be sampled together")
            return self._sample_one_by_one(logits, rows)

    def _sample_one_by_one(self, logits: Tensor, rows: list[SamplingRow]) -> tuple[Sampled, list[int]]:
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        candidates: dict[int, tuple[Candidate, ...]] = {}
        failed = []
        for index, row in enumerate(rows):
            try:
                alone = sample_rows(logits[index : index + 1], [row], self._kernels)
            except Exception:
                logger.exception("a row could not be sampled: %s", row)
                failed.append(index)
                continue
            token_ids[index : index + 1] = alone.token_ids
            if row.num_candidates:
                candidates[index] = alone.candidates[0]
        return Sampled(token_ids, candidates), failed

    def _broadcast(self, plan: StepPlan) -> None:
        if self._collectives.size > 1:
            self._collectives.broadcast_plan(pack_plan(plan))
