"""The logits of every position of given token sequences, by the engine's own model runner and KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.worker.model_runner import Limits, ModelRunner
from octavo.worker.step_plan import PlanKind, StepPlan

Tokens = Sequence[int]


def logits_of(runner: ModelRunner, sequences: Sequence[Tokens]) -> Iterator[Tensor]:
    """For each sequence its logits, float32 ``[tokens, vocabulary]``: row i is what follows token i.

    Each is computed in one step, with as many others as fit: what is in the runner's KV blocks is overwritten. A
    sequence may have as many tokens as a step. Nothing else may use the runner meanwhile.
    """
    for group in groups(sequences, runner.limits):
        logits = runner.execute(plan_of(group, runner.limits.block_size))
        assert logits is not None  # this is rank 0
        yield from torch.split(logits, [len(tokens) for tokens in group])


def groups(sequences: Sequence[Tokens], limits: Limits) -> Iterator[list[Tokens]]:
    """Neighbours that fit into one step together. Raises ValueError for one that does not fit alone."""
    group: list[Tokens] = []
    for tokens in sequences:
        if not 0 < len(tokens) <= limits.max_num_batched_tokens:
            raise ValueError(f"a sequence of {len(tokens)} tokens, a step has 1 to {limits.max_num_batched_tokens}")
        num_tokens = sum(map(len, group)) + len(tokens)
        if len(group) == limits.max_num_seqs or num_tokens > limits.max_num_batched_tokens:
            yield group
            group = []
        group.append(tokens)
    if group:
        yield group


def plan_of(group: Sequence[Tokens], block_size: int) -> StepPlan:
    """One step that computes all of each sequence, on blocks of its own from block 0 on, with a row for each token."""
    num_tokens = np.array([len(tokens) for tokens in group], np.int32)
    num_blocks = -(-num_tokens // block_size)
    slots = np.arange(len(group), dtype=np.int32)
    return StepPlan(
        PlanKind.STEP,
        slots=slots,
        num_new_tokens=num_tokens,
        num_computed_tokens=np.zeros_like(num_tokens),
        token_ids=np.concatenate([np.asarray(tokens, np.int32) for tokens in group]),
        table_updates=np.stack([slots, np.zeros_like(slots), num_blocks], axis=1),
        table_blocks=np.arange(num_blocks.sum(), dtype=np.int32),
        logit_indices=np.arange(num_tokens.sum(), dtype=np.int32),
    )


def common_prefix(first: Tokens, second: Tokens) -> int:
    """Tokens before the first difference."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
