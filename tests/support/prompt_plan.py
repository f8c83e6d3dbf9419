"""One sequence of known tokens, as plans for a runner with blocks of 4 tokens; and its logits by transformers."""

from __future__ import annotations

import numpy as np
import torch

from octavo.worker.executor import Executor
from octavo.worker.model_runner import ModelRunner
from octavo.worker.step_plan import PlanKind, StepPlan

LENGTH = 40
TOKENS = np.random.default_rng(0).integers(0, 96, LENGTH).astype(np.int32)


def prompt_plan(first: int, count: int) -> StepPlan:
    """Computes ``count`` tokens, the first of them at position ``first``, and the logits of all of them."""
    return StepPlan(
        PlanKind.STEP,
        slots=np.array([0], np.int32),
        num_new_tokens=np.array([count], np.int32),
        num_computed_tokens=np.array([first], np.int32),
        token_ids=TOKENS[first : first + count],
        table_updates=np.array([[0, 0, LENGTH // 4]], np.int32),
        table_blocks=np.arange(LENGTH // 4, dtype=np.int32),
        logit_indices=np.arange(count, dtype=np.int32),
    )


def compute(runner: ModelRunner, executor: Executor | None = None, first: int = 0, count: int = LENGTH) -> torch.Tensor:
    """Logits ``[count, vocabulary]``; ``executor`` takes the other ranks along."""
    plan = prompt_plan(first, count)
    if executor is not None:
        executor._broadcast(plan)
    logits = runner.execute(plan)
    assert logits is not None
    return logits.clone()


@torch.inference_mode()
def expected_logits(model: torch.nn.Module) -> torch.Tensor:
    """``[LENGTH, vocabulary]``, of a model of transformers."""
    logits: torch.Tensor = model(torch.from_numpy(TOKENS).long()[None]).logits[0]
    return logits
