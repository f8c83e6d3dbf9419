"""What a rank proves before it is ready: that ranks add up right, and that the model gives what it should.

A broken link between devices, a kernel that does not fit the driver or damaged weights give tokens all the same; here
they end the start, with names and numbers. All ranks of a group run it at the same time.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .collectives import Collectives
from .errors import ConfigurationError
from .model_runner import ModelRunner
from .step_plan import PlanKind, StepPlan

EMBEDDED_PROMPT = (33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28, 216, 38, 28)
"""``1, 2, 3, 4, 5, 6,`` in tokens of SmolLM2."""

EMBEDDED_ANSWER = (216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32)
"""`` 7, 8, 9, 10``: what transformers' float32 model answers, each token at least 3.1 above the next best logit."""

MOST_BELOW_BEST = 2.0
"""How far the logit of a token of the answer may lie below the best one. Above what eight bits change, far below what
anything broken does."""

_LENGTH = 4096


def run_self_test(runner: ModelRunner, collectives: Collectives, *, is_embedded: bool) -> None:
    """Raises ConfigurationError, in one sentence with the numbers, when this rank must not serve."""
    check_all_reduce(collectives, runner.placement.device)
    logits = runner.execute(_plan(runner))
    if logits is not None:
        _check_logits(logits, is_embedded)


def check_all_reduce(collectives: Collectives, device: torch.device) -> None:
    """The sum of vectors that every rank knows; exact in float32, whatever the order."""
    counts = torch.arange(_LENGTH, dtype=torch.float32, device=device)
    total = collectives.all_reduce(counts * (collectives.rank + 1))
    expected = counts * (collectives.size * (collectives.size + 1) // 2)
    wrong = (total != expected).nonzero().flatten()
    if wrong.numel():
        first = int(wrong[0])
        raise ConfigurationError(
            f"self-test of rank {collectives.rank} of {collectives.size}: an all-reduce of {_LENGTH} numbers gave "
            f"{wrong.numel()} wrong sums, number {first} is {float(total[first]):g} and should be "
            f"{float(expected[first]):g}: the ranks' devices do not exchange data correctly"
        )


def _plan(runner: ModelRunner) -> StepPlan:
    """The prompt and its answer, as much as may be, in the first blocks; the logits of all tokens."""
    limits = runner.limits
    length = min(limits.max_model_len, limits.max_num_batched_tokens)
    tokens = np.array(EMBEDDED_PROMPT + EMBEDDED_ANSWER, np.int32)[:length] % runner.config.vocab_size
    num_blocks = -(-tokens.size // limits.block_size)
    return StepPlan(
        PlanKind.STEP,
        table_updates=np.array([[0, 0, num_blocks]], np.int32),
        table_blocks=np.arange(num_blocks, dtype=np.int32),
        slots=np.zeros(1, np.int32),
        num_new_tokens=np.array([tokens.size], np.int32),
        num_computed_tokens=np.zeros(1, np.int32),
        token_ids=tokens,
        logit_indices=np.arange(tokens.size, dtype=np.int32),
    )


def _check_logits(logits: Tensor, is_embedded: bool) -> None:
    """Of any model they are finite; the embedded one predicts the answer."""
    if not bool(logits.isfinite().all()):
        raise ConfigurationError(
            f"self-test: {int((~logits.isfinite()).sum())} of the model's {logits.numel()} logits are not finite: its "
            "weights are damaged, or its activations overflow --dtype"
        )
    if is_embedded:
        _check_answer(logits)


def _check_answer(logits: Tensor) -> None:
    predicted = logits[len(EMBEDDED_PROMPT) - 1 : -1]
    answer = torch.tensor(EMBEDDED_ANSWER[: len(predicted)], device=logits.device)
    below = (predicted.amax(dim=1) - predicted.gather(1, answer[:, None])[:, 0]).tolist()
    worst = max(range(len(below)), key=below.__getitem__, default=0)
    if below and below[worst] > MOST_BELOW_BEST:
        raise ConfigurationError(
            f"self-test: the embedded model's logit of token {EMBEDDED_ANSWER[worst]}, number {worst + 1} of its known "
            f"answer, is {below[worst]:.1f} below the best, {MOST_BELOW_BEST:g} are allowed: this device or its "
            "libraries compute wrong"
        )
