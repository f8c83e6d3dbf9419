"""What a step tells of prompts beside the next token: how likely their tokens were, and sums of their hidden states.

Logits of a whole prompt would take the vocabulary's size for each of its tokens. So the product with the vocabulary is
made for some rows at a time, and reduced to what is wanted of them before the next ones. All ranks take part.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.backend import Kernels
from ..kernels.sampling import Logprobs
from .host_copy import HostCopy, to_device
from .messages import TokenLogprobs
from .model.transformer import Transformer
from .step_plan import Int32Array, StepPlan
from .token_logprobs import LogprobsCopy, RowLogprobs

ROWS_AT_ONCE = 128
"""Of hidden states that are read: enough for a product at full speed; their logits take 64 MB for 128k tokens."""

Scores: TypeAlias = tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class PromptReadings:
    """Of one step, on the device; see ``StepPlan``."""

    scores: Logprobs | None
    """Of the tokens of all ``scored`` runs, one run's after the other's; the largest ``k`` for all. None without any,
    and on ranks above 0."""
    sums: Tensor
    """float32 ``[Q, hidden]``."""


def read_prompts(plan: StepPlan, x: Tensor, residual: Tensor, model: Transformer, kernels: Kernels) -> PromptReadings:
    """Read what ``model.hidden`` has given for the tokens of ``plan``, which stays as it is."""
    scores = _score(plan, x, residual, model, kernels) if len(plan.scored) else None
    sums = [_sum(model, x, residual, *run) for run in plan.pooled.tolist()]
    return PromptReadings(scores, torch.stack(sums) if sums else x.new_empty(0, x.shape[1], dtype=torch.float32))


def _score(plan: StepPlan, x: Tensor, residual: Tensor, model: Transformer, kernels: Kernels) -> Logprobs | None:
    rows, targets = scored_tokens(plan)
    num_likeliest = int(plan.scored[:, 2].max())
    parts = []
    for begin in range(0, rows.size, ROWS_AT_ONCE):
        some = slice(begin, begin + ROWS_AT_ONCE)
        indices = to_device(rows[some], x.device)
        logits = model.logits(x.index_select(0, indices), residual.index_select(0, indices))
        if logits is not None:
            next_tokens = to_device(targets[some], x.device).long()
            parts.append(kernels.logprobs(logits, next_tokens, min(num_likeliest, logits.shape[1])))
    return _joined(parts) if parts else None


def scored_tokens(plan: StepPlan) -> tuple[Int32Array, Int32Array]:
    """Of each token of the plan's ``scored`` runs: its index, and the id that follows it."""
    rows, targets = [], []
    for first, count, _, last_target in plan.scored.tolist():
        rows.append(np.arange(first, first + count, dtype=np.int32))
        targets.append(plan.token_ids[first + 1 : first + count])
        targets.append(np.array([last_target], np.int32))
    return np.concatenate(rows), np.concatenate(targets)


def _joined(parts: list[Logprobs]) -> Logprobs:
    return Logprobs(
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.ranks for part in parts]),
        torch.cat([part.top_token_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
    )


def _sum(model: Transformer, x: Tensor, residual: Tensor, first: int, count: int) -> Tensor:
    """float32 ``[hidden]``: the sum of the last hidden states of ``count`` tokens."""
    total = x.new_zeros(x.shape[1], dtype=torch.float32)
    for begin in range(first, first + count, ROWS_AT_ONCE):
        some = slice(begin, min(begin + ROWS_AT_ONCE, first + count))
        total += model.final(x[some].clone(), residual[some].clone()).float().sum(dim=0)
    return total


class ReadingsOnHost:
    """The readings of a step on their way to the host."""

    def __init__(self, plan: StepPlan, readings: PromptReadings) -> None:
        self._lengths = plan.scored[:, 1].tolist()
        self._scores: LogprobsCopy | None = None
        if readings.scores is not None:
            counts = np.repeat(plan.scored[:, 2], plan.scored[:, 1]).tolist()
            self._scores = LogprobsCopy(RowLogprobs(list(range(len(counts))), counts, readings.scores))
        self._sums = HostCopy(readings.sums)

    def scores(self) -> tuple[Scores, ...]:
        """Of each scored run, when they are there."""
        found = iter(() if self._scores is None else self._scores.wait().values())
        return tuple(tuple(islice(found, length)) for length in self._lengths)

    def sums(self) -> tuple[NDArray[np.float32], ...]:
        """Of each pooled run ``[hidden]``, when they are there."""
        return tuple(self._sums.wait().numpy())
