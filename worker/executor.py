"""Carries out step plans on all ranks of a worker group. The leader drives; the others follow."""

from __future__ import annotations

import threading
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.backend import Kernels
from .collectives import Collectives
from .sampler import sample_rows
from .sampling_row import SamplingRow
from .step_plan import Int32Array, PlanKind, StepPlan, pack_plan, unpack_plan


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
        return [int(token) for token in tokens]

    def heartbeat(self) -> None:
        """Tell idle ranks that the leader lives; notices a dead rank."""
        self._broadcast(StepPlan(PlanKind.HEARTBEAT))

    def shut_down(self) -> None:
        """Let the other ranks return from ``follow``."""
        self._broadcast(StepPlan(PlanKind.SHUTDOWN))

    def _broadcast(self, plan: StepPlan) -> None:
        if self._collectives.size > 1:
            self._collectives.broadcast_plan(pack_plan(plan))


def follow(runner: Runner, collectives: Collectives, device: torch.device, stopped: threading.Event) -> None:
    """Ranks 1 …: carry out the leader's plans until it shuts down or ``stopped`` is set.

    Raises RuntimeError when the leader is gone.
    """
    while not stopped.is_set():
        plan = unpack_plan(_receive(collectives))
        if plan.kind is PlanKind.SHUTDOWN:
            return
        if plan.kind is PlanKind.STEP:
            runner.execute(plan)
            if plan.share_sampled:
                runner.remember(plan.step, collectives.share_sampled(None, plan.logit_indices.size, device))


def _receive(collectives: Collectives) -> Int32Array:
    return collectives.broadcast_plan(None)
