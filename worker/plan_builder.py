"""PlanBuilder: collects what one step does and turns it into a StepPlan and the rows to sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .sequence import Sequence
from .step_plan import PlanKind, StepPlan


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """``num_tokens`` of ``sequence``, from position ``start`` on, are computed in this step."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """The step reaches the end of what is known of the sequence: its next token is drawn."""
        return self.start + self.num_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step for the ranks (``plan``) and for the leader (``scheduled``, in the same order as the plan's rows)."""

    plan: StepPlan
    scheduled: tuple[ScheduledSequence, ...]

    @property
    def sampled(self) -> list[Sequence]:
        """Sequences whose next token is drawn; row i of the plan's logits belongs to the i-th."""
        return [entry.sequence for entry in self.scheduled if entry.samples]

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens computed beyond one for each sequence that samples."""
        return sum(entry.num_tokens for entry in self.scheduled) - len(self.sampled)


class PlanBuilder:
    """Sequences are added in the order in which they are scheduled; a preempted one is taken out again."""

    def __init__(self) -> None:
        self._scheduled: dict[int, ScheduledSequence] = {}

    def add(self, entry: ScheduledSequence) -> None:
        self._scheduled[id(entry.sequence)] = entry

    def remove(self, sequence: Sequence) -> int:
        """Take ``sequence`` out; the number of tokens it had in this step (0 if it was not in it)."""
        entry = self._scheduled.pop(id(sequence), None)
        return 0 if entry is None else entry.num_tokens

    def __len__(self) -> int:
        return len(self._scheduled)

    def build(self, step: int) -> ScheduledStep:
        entries = tuple(self._scheduled.values())
        starts = np.cumsum([0] + [entry.num_tokens for entry in entries])
        updates, blocks = _table_updates(entries)
        tokens = [np.frombuffer(_tokens(entry), np.int32) for entry in entries]
        plan = StepPlan(
            kind=PlanKind.STEP,
            step=step,
            slots=_int32([entry.sequence.slot for entry in entries]),
            num_new_tokens=_int32([entry.num_tokens for entry in entries]),
            num_computed_tokens=_int32([entry.start for entry in entries]),
            token_ids=np.concatenate(tokens) if tokens else _int32([]),
            table_updates=_int32(updates).reshape(-1, 3),
            table_blocks=_int32(blocks),
            logit_indices=_int32([end - 1 for end, entry in zip(starts[1:], entries, strict=True) if entry.samples]),
        )
        return ScheduledStep(plan, entries)


def _tokens(entry: ScheduledSequence) -> bytes:
    return entry.sequence.token_ids[entry.start : entry.start + entry.num_tokens].tobytes()


def _table_updates(entries: tuple[ScheduledSequence, ...]) -> tuple[list[tuple[int | None, int, int]], list[int]]:
    """What the ranks do not know yet of the block tables of the sequences in this step; notes that they now do."""
    updates, blocks = [], []
    for sequence in (entry.sequence for entry in entries):
        new = sequence.block_table[sequence.num_sent_blocks :]
        if new:
            updates.append((sequence.slot, sequence.num_sent_blocks, len(new)))
            blocks.extend(new)
            sequence.num_sent_blocks += len(new)
    return updates, blocks


def _int32(values: list[int] | list[int | None] | list[tuple[int | None, int, int]]) -> np.ndarray:
    return np.array(values, np.int32)
