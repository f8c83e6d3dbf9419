"""PlanBuilder: collects what one step does and turns it into a StepPlan and the rows to sample."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass

import numpy as np

from .sequence import Sequence
from .step_plan import Int32Array, PlanKind, StepPlan


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step for the ranks (``plan``) and for the leader."""

    plan: StepPlan
    scheduled: Mapping[Sequence, int]
    """Sequence → its tokens in this step, in the order of the plan. They end at its ``num_computed_tokens``."""
    sampled: tuple[Sequence, ...]
    """Sequences that the step computes to their end, so that their next token is drawn; row i of the plan's logits
    belongs to the i-th."""

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens computed beyond one for each sequence that samples."""
        return self.plan.token_ids.size - len(self.sampled)


class PlanBuilder:
    """Sequences are added in the order in which they are scheduled; a preempted one is taken out again."""

    def __init__(self) -> None:
        self._scheduled: dict[Sequence, int] = {}

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """The last ``num_tokens`` of the sequence's ``num_computed_tokens`` are computed in this step."""
        self._scheduled[sequence] = num_tokens

    def remove(self, sequence: Sequence) -> int:
        """Take ``sequence`` out; the number of tokens it had in this step (0 if it was not in it)."""
        return self._scheduled.pop(sequence, 0)

    def __len__(self) -> int:
        return len(self._scheduled)

    def build(self, step: int) -> ScheduledStep:
        """The step; the ranks then know the block tables of its sequences as they are now."""
        scheduled = self._scheduled
        token_ids, sampled, logit_indices = _tokens(scheduled)
        updates, blocks = _table_updates(scheduled)
        plan = StepPlan(
            kind=PlanKind.STEP,
            step=step,
            slots=_int32([sequence.slot for sequence in scheduled]),
            num_new_tokens=_int32(list(scheduled.values())),
            num_computed_tokens=_int32([s.num_computed_tokens - num_new for s, num_new in scheduled.items()]),
            token_ids=np.frombuffer(token_ids, np.int32),
            table_updates=_int32(updates).reshape(-1, 3),
            table_blocks=_int32(blocks),
            logit_indices=_int32(logit_indices),
        )
        return ScheduledStep(plan, scheduled, tuple(sampled))


def _tokens(scheduled: Mapping[Sequence, int]) -> tuple[array[int], list[Sequence], list[int]]:
    """The step's input tokens; the sequences that it computes to their end, and which token that is."""
    token_ids, sampled, ends = array("i"), [], []
    for sequence, num_tokens in scheduled.items():
        end = sequence.num_computed_tokens
        token_ids += sequence.token_ids[end - num_tokens : end]
        if end == len(sequence.token_ids):
            sampled.append(sequence)
            ends.append(len(token_ids) - 1)
    return token_ids, sampled, ends


def _table_updates(scheduled: Iterable[Sequence]) -> tuple[list[tuple[int | None, int, int]], list[int]]:
    """What the ranks do not know yet of the block tables of the sequences in this step; notes that they now do."""
    updates, blocks = [], []
    for sequence in scheduled:
        num_sent, num_blocks = sequence.num_sent_blocks, len(sequence.block_table)
        if num_sent < num_blocks:
            updates.append((sequence.slot, num_sent, num_blocks - num_sent))
            blocks += sequence.block_table[num_sent:]
            sequence.num_sent_blocks = num_blocks
    return updates, blocks


def _int32(values: Sized) -> Int32Array:
    return np.array(values, np.int32)
