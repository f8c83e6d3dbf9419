"""PlanBuilder: collects what one step does and turns it into a StepPlan and the rows to sample."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .sequence import Sequence
from .step_plan import Int32Array, PlanKind, StepPlan


class ScheduledSequence(NamedTuple):
    """``num_tokens`` of ``sequence``, from position ``start`` on, are computed in this step."""

    sequence: Sequence
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step for the ranks (``plan``) and for the leader (``scheduled``, in the same order as the plan's rows)."""

    plan: StepPlan
    scheduled: tuple[ScheduledSequence, ...]
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
        self._scheduled: dict[int, ScheduledSequence] = {}

    def add(self, sequence: Sequence, start: int, num_tokens: int) -> None:
        self._scheduled[id(sequence)] = ScheduledSequence(sequence, start, num_tokens)

    def remove(self, sequence: Sequence) -> int:
        """Take ``sequence`` out; the number of tokens it had in this step (0 if it was not in it)."""
        entry = self._scheduled.pop(id(sequence), None)
        return 0 if entry is None else entry.num_tokens

    def __len__(self) -> int:
        return len(self._scheduled)

    def build(self, step: int) -> ScheduledStep:
        """The step; the ranks then know the block tables of its sequences as they are now."""
        entries = tuple(self._scheduled.values())
        token_ids, sampled, logit_indices = _tokens(entries)
        updates, blocks = _table_updates(entries)
        plan = StepPlan(
            kind=PlanKind.STEP,
            step=step,
            slots=_int32([sequence.slot for sequence, _, _ in entries]),
            num_new_tokens=_int32([num_tokens for _, _, num_tokens in entries]),
            num_computed_tokens=_int32([start for _, start, _ in entries]),
            token_ids=np.frombuffer(token_ids, np.int32),
            table_updates=_int32(updates).reshape(-1, 3),
            table_blocks=_int32(blocks),
            logit_indices=_int32(logit_indices),
        )
        return ScheduledStep(plan, entries, tuple(sampled))


def _tokens(entries: tuple[ScheduledSequence, ...]) -> tuple[array[int], list[Sequence], list[int]]:
    """The step's input tokens; the sequences that it computes to their end, and which token that is."""
    token_ids, sampled, ends = array("i"), [], []
    for sequence, start, num_tokens in entries:
        end = start + num_tokens
        token_ids += sequence.token_ids[start:end]
        if end == len(sequence.token_ids):
            sampled.append(sequence)
            ends.append(len(token_ids) - 1)
    return token_ids, sampled, ends


def _table_updates(entries: tuple[ScheduledSequence, ...]) -> tuple[list[tuple[int | None, int, int]], list[int]]:
    """What the ranks do not know yet of the block tables of the sequences in this step; notes that they now do."""
    updates, blocks = [], []
    for sequence, _, _ in entries:
        num_sent, num_blocks = sequence.num_sent_blocks, len(sequence.block_table)
        if num_sent < num_blocks:
            updates.append((sequence.slot, num_sent, num_blocks - num_sent))
            blocks += sequence.block_table[num_sent:]
            sequence.num_sent_blocks = num_blocks
    return updates, blocks


def _int32(values: Collection[Any]) -> Int32Array:
    return np.array(values, np.int32)
