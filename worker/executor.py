"""Executor: carries out step plans on all ranks of a worker group, from the leader's side."""

from __future__ import annotations

import logging
from typing import Protocol

from torch import Tensor

from ..kernels.backend import Kernels
from .collectives import Collectives
from .sampler import sample_rows
from .sampling_row import SamplingRow
from .step_plan import PlanKind, StepPlan, pack_plan

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

    def execute(self, plan: StepPlan, rows: list[SamplingRow]) -> list[int | None]:
        """Run one step on all ranks; the sampled token of each row of logits, None for one that cannot be sampled.

        Raises RuntimeError when a rank does not answer: the group is then unusable.
        """
        self._broadcast(plan)
        logits = self._runner.execute(plan)
        if logits is None or not rows:
            return []
        try:
            tokens = sample_rows(logits, rows, self._kernels)
        except Exception:  # what one request asks for must not end the others, nor the group
            if plan.share_sampled:
                raise  # the other ranks wait for tokens that do not come
            logger.exception("a step's rows could not be sampled together")
            return [self._sample_alone(logits[index : index + 1], row) for index, row in enumerate(rows)]
        if plan.share_sampled:
            shared = self._collectives.share_sampled(tokens, len(rows), tokens.device)
            self._runner.remember(plan.step, shared)
        return [int(token) for token in tokens.tolist()]  # one copy from the device, not one a token

    def _sample_alone(self, logits: Tensor, row: SamplingRow) -> int | None:
        try:
            return int(sample_rows(logits, [row], self._kernels))
        except Exception:
            logger.exception("a row could not be sampled: %s", row)
            return None

    def heartbeat(self) -> None:
        """Tell idle ranks that the leader lives; notices a dead rank."""
        self._broadcast(StepPlan(PlanKind.HEARTBEAT))

    def shut_down(self) -> None:
        """Let the other ranks return from ``follow``."""
        self._broadcast(StepPlan(PlanKind.SHUTDOWN))

    def _broadcast(self, plan: StepPlan) -> None:
        if self._collectives.size > 1:
            self._collectives.broadcast_plan(pack_plan(plan))
