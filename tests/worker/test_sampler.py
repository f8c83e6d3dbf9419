"""Rows of one step are sampled each by its own wishes, from logits as the runner gives them."""

from __future__ import annotations

import torch

from octavo.kernels.backend import Kernels, select_kernels
from octavo.worker.collectives import SingleProcess
from octavo.worker.executor import Executor
from octavo.worker.sampler import sample_rows
from octavo.worker.sampling_row import SamplingRow
from octavo.worker.step_plan import PlanKind, StepPlan

KERNELS: Kernels = select_kernels(torch.device("cpu"))


def row(seed: int = 0, temperature: float = 0.0, banned: tuple[int, ...] = ()) -> SamplingRow:
    return SamplingRow(seed, 0, 0, temperature, 1.0, None, banned)


@torch.inference_mode()
def made_in_inference_mode() -> torch.Tensor:
    return torch.tensor([[0.0, 3.0, 2.0, 1.0]] * 2)


def test_banned_tokens_are_not_drawn_also_from_inference_tensors() -> None:
    tokens = sample_rows(made_in_inference_mode(), [row(banned=(1, 99, -1)), row()], KERNELS)
    assert tokens.tolist() == [2, 1]
    tokens = sample_rows(made_in_inference_mode(), [row(temperature=1.0, banned=(0, 1, 2)), row()], KERNELS)
    assert tokens.tolist() == [3, 1]


class Logits:
    """A runner that gives two rows of logits."""

    def execute(self, plan: StepPlan) -> torch.Tensor:
        return made_in_inference_mode()

    def remember(self, step: int, token_ids: torch.Tensor) -> None: ...


def test_a_row_that_cannot_be_sampled_leaves_the_others_alone() -> None:
    executor = Executor(Logits(), SingleProcess(), KERNELS)
    bad = row(seed=-1, temperature=1.0)  # a seed is 64 bits, unsigned
    assert executor.execute(StepPlan(PlanKind.STEP), [bad, row()]) == [None, 1]
