"""Executor: carries out step plans on all ranks of a worker group, from the leader's side."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..kernels.backend import Kernels
from .collectives import Collectives
from .sampler import sample_rows
from .sampling_row import SamplingRow
from .step_plan import PlanKind, StepPlan, pack_plan


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

    def execute(self, plan: StepPlan, rows: list[SamplingRow]) -> list[int]:
        """Run one step on all ranks; the sampled token of each row of logits.

        Raises RuntimeError when a rank does not answer: the group is then unusable.
        """
        self._broadcast(plan)
        logits = self._runner.execute(plan)
        if logits is None or not rows:
            return []
        tokens = sample_rows(logits, rows, self._kernels)
        if plan.share_sampled:
            shared = self._collectives.share_sampled(tokens, len(rows), tokens.device)
            self._runner.remember(plan.step, shared)
        return [int(token) for token in tokens.tolist()]  # one copy from the device, not one a token

    def heartbeat(self) -> None:
        """Tell idle ranks that the leader lives; notices a dead rank."""
        self._broadcast(StepPlan(PlanKind.HEARTBEAT))

    def shut_down(self) -> None:
        """Let the other ranks return from ``follow``."""
        self._broadcast(StepPlan(PlanKind.SHUTDOWN))

    def _broadcast(self, plan: StepPlan) -> None:
        if self._collectives.size > 1:
            self._collectives.broadcast_plan(pack_plan(plan))
