"""PlanBuilder: collects what one step does and turns it into a StepPlan and the rows to sample."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass

import numpy as np

from .sequence import Sequence
from .step_plan import Int32Array, PlanKind, StepPlan

_WIRE_NUMBERS = 2**31
"""Steps are numbered in int32 on the wire, round and round."""


@dataclass(frozen=True, slots=True)
class PromptRead:
    """Tokens of a prompt, computed in a step, that are scored or pooled."""

    sequence: Sequence
    position: int
    """Of the first of them in the prompt."""
    count: int
    index: int
    """Of the first of them in the step."""


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step for the ranks (``plan``) and for the leader."""

    number: int
    """Counts steps from 1, without end."""
    plan: StepPlan
    scheduled: Mapping[Sequence, int]
    """Sequence → its tokens in this step, in the order of the plan. They end at its ``num_computed_tokens``."""
    sampled: tuple[Sequence, ...]
    """Sequences whose next token is drawn; row i of the plan's logits belongs to the i-th."""
    positions: tuple[int, ...]
    """For each of ``sampled``: which output token is drawn, from 0."""
    forks: tuple[Sequence, ...] = ()
    """Branches made in this step; they are in ``sampled`` too."""
    scored: tuple[PromptRead, ...] = ()
    """One for each of the plan's."""
    pooled: tuple[PromptRead, ...] = ()
    """One for each of the plan's."""
    completed: tuple[Sequence, ...] = ()
    """Sequences that draw nothing, computed to their end: with this step they are over."""
    admitted: tuple[Sequence, ...] = ()
    """Sequences that were admitted for the first time since the step before; they may have ended since."""

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens computed beyond one for each sequence of which a token is drawn."""
        return self.plan.token_ids.size - self.num_decoded

    @property
    def num_decoded(self) -> int:
        """Sequences computed to their end, where a token is drawn."""
        return len(self.sampled) - len(self.forks)

    @property
    def prefill_context(self) -> float:
        """Tokens before a token of prefill, mean over those of the step: half of its own chunk, and what was computed
        before; 0.0 without prefill."""
        if self.num_prefill_tokens == 0:
            return 0.0
        plan = self.plan
        counts = plan.num_new_tokens.copy()
        last_tokens = np.cumsum(counts) - 1
        counts[np.searchsorted(last_tokens, plan.logit_indices)] -= 1  # once, also where branches share a row
        return float(np.average(plan.num_computed_tokens + counts / 2, weights=counts))


@dataclass(slots=True)
class _Rows:
    """What becomes the columns of a StepPlan: one entry for each sequence, table update, token, or token drawn."""

    slots: list[int | None]
    computed: list[int]
    token_ids: array[int]
    uses_pending: bool
    """Some of the tokens are what the step before samples."""
    updates: list[tuple[int | None, int, int]]
    blocks: list[int]
    sampled: list[Sequence]
    positions: list[int]
    ends: list[int]
    completed: list[Sequence]

    def fork(self, sequence: Sequence, branches: list[Sequence]) -> None:
        """Each of ``branches`` draws a token of its own from the logits of ``sequence``."""
        row = self.sampled.index(sequence)
        for branch in branches:
            branch.num_pending_tokens = sequence.num_pending_tokens
            branch.pending_row = len(self.sampled)
            self.sampled.append(branch)
            self.positions.append(self.positions[row])
            self.ends.append(self.ends[row])


class PlanBuilder:
    """Sequences are added in the order in which they are scheduled; a preempted one is taken out again."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._scheduled: dict[Sequence, int] = {}
        self._copies: dict[Sequence, tuple[int, int]] = {}
        self._sources: dict[int, int] = {}

    def add_decode(self, sequence: Sequence) -> None:
        """Its next token is computed in this step; it has none in it yet."""
        self._scheduled[sequence] = 1
        self.num_tokens += 1

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """The last ``num_tokens`` of the sequence's ``num_computed_tokens`` are computed in this step.

        May be called again for the same sequence: what it adds follows what it had.
        """
        self._scheduled[sequence] = self._scheduled.get(sequence, 0) + num_tokens
        self.num_tokens += num_tokens

    def copy(self, sequence: Sequence, source: int, destination: int) -> None:
        """Before the step, block ``source`` is copied to ``destination``, which is in the sequence's table.

        ``source`` stays held by one reference until ``sources`` are released.
        """
        self._copies[sequence] = (source, destination)
        self._sources[source] = self._sources.get(source, 0) + 1

    def remove(self, sequence: Sequence) -> int:
        """Take ``sequence`` out; the number of tokens it had in this step (0 if it was not in it)."""
        num_tokens = self._scheduled.pop(sequence, 0)
        self.num_tokens -= num_tokens
        self._copies.pop(sequence, None)
        return num_tokens

    def __len__(self) -> int:
        return len(self._scheduled)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._scheduled

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._scheduled)

    def num_copies_of(self, block: int) -> int:
        """References to ``block`` that copies hold, also those of sequences taken out."""
        return self._sources.get(block, 0)

    @property
    def sources(self) -> Iterator[int]:
        """A block for each reference that copies hold."""
        return (block for block, count in self._sources.items() for _ in range(count))

    @property
    def num_copies(self) -> int:
        return len(self._copies)

    def build(
        self,
        number: int,
        forks: Mapping[Sequence, list[Sequence]],
        *,
        plans_ahead: bool,
        reads_prompts: bool = False,
        admitted: tuple[Sequence, ...] = (),
    ) -> ScheduledStep:
        """The step; the ranks then know the block tables of its sequences as they are now.

        ``forks``: sequence → branches that draw from the same logits. Tokens that are not known yet are those that the
        step before this one samples. ``plans_ahead``: the next step may be planned before this one is over.
        ``reads_prompts``: some sequences may be scored or pooled.
        """
        rows = self._rows()
        for sequence, forked in forks.items():
            rows.fork(sequence, forked)
        reads = self._read_prompts() if reads_prompts else []
        scored = tuple(read for read in reads if read.sequence.request.pooling is None)
        pooled = tuple(read for read in reads if read.sequence.request.pooling is not None)
        return ScheduledStep(
            number,
            self._plan(number, rows, scored, pooled, plans_ahead=plans_ahead),
            self._scheduled,
            tuple(rows.sampled),
            tuple(rows.positions),
            tuple(branch for forked in forks.values() for branch in forked),
            scored,
            pooled,
            tuple(rows.completed),
            admitted,
        )

    def _rows(self) -> _Rows:
        """The tokens of all sequences, and what is drawn after them. From here on the ranks know their tables."""
        slots, computed, updates, blocks = [], [], [], []
        sampled: list[Sequence] = []
        completed: list[Sequence] = []
        token_ids, positions, ends, uses_pending = array("i"), [], [], False
        for sequence, num_tokens in self._scheduled.items():  # the hot loop of planning: no calls, few attributes
            end, tokens = sequence.num_computed_tokens, sequence.token_ids
            start, known = end - num_tokens, len(tokens)
            slots.append(sequence.slot)
            computed.append(start)
            if end > known:  # its last token is what the step under way samples
                token_ids += tokens[start:known]
                token_ids.append(-1 - sequence.pending_row)
                uses_pending = True
            elif num_tokens == 1:
                token_ids.append(tokens[start])
            else:
                token_ids += tokens[start:end]
            if end == known + sequence.num_pending_tokens:
                if sequence.draws:
                    if end + 1 < sequence.plan_limit:
                        sequence.num_pending_tokens += 1
                        sequence.pending_row = len(sampled)
                    positions.append(end - sequence.num_prompt_tokens)
                    sampled.append(sequence)
                    ends.append(len(token_ids) - 1)
                else:
                    completed.append(sequence)
            num_sent, num_blocks = sequence.num_sent_blocks, len(sequence.block_table)
            if num_sent < num_blocks:
                updates.append((sequence.slot, num_sent, num_blocks - num_sent))
                blocks += sequence.block_table[num_sent:]
                sequence.num_sent_blocks = num_blocks
        return _Rows(slots, computed, token_ids, uses_pending, updates, blocks, sampled, positions, ends, completed)

    def _plan(
        self,
        number: int,
        rows: _Rows,
        scored: tuple[PromptRead, ...],
        pooled: tuple[PromptRead, ...],
        *,
        plans_ahead: bool,
    ) -> StepPlan:
        return StepPlan(
            kind=PlanKind.STEP,
            step=number % _WIRE_NUMBERS,
            slots=_int32(rows.slots),
            num_new_tokens=_int32(list(self._scheduled.values())),
            num_computed_tokens=_int32(rows.computed),
            token_ids=np.frombuffer(rows.token_ids, np.int32),
            tokens_from_step=(number - 1) % _WIRE_NUMBERS if rows.uses_pending else None,
            table_updates=_int32(rows.updates).reshape(-1, 3),
            table_blocks=_int32(rows.blocks),
            copies=_int32(list(self._copies.values())).reshape(-1, 2),
            logit_indices=_int32(rows.ends),
            scored=_int32([_scored_run(read) for read in scored]).reshape(-1, 4),
            pooled=_int32([(read.index, read.count) for read in pooled]).reshape(-1, 2),
            share_sampled=plans_ahead and any(sequence.num_pending_tokens for sequence in rows.sampled),
        )

    def _read_prompts(self) -> list[PromptRead]:
        """What is scored or pooled in this step, in its order; each token of a prompt once, however often computed."""
        reads, index = [], 0
        for sequence, num_tokens in self._scheduled.items():
            end = sequence.num_computed_tokens
            first, last = max(end - num_tokens, sequence.num_read_tokens), min(end, sequence.num_tokens_to_read)
            index += num_tokens
            if first < last:
                reads.append(PromptRead(sequence, first, last - first, index - (end - first)))
                sequence.num_read_tokens = last
        return reads


def _scored_run(read: PromptRead) -> tuple[int, int, int, int]:
    """See ``StepPlan.scored``."""
    sequence = read.sequence
    num_likeliest = sequence.request.sampling.num_prompt_logprobs or 0
    return read.index, read.count, num_likeliest, sequence.token_ids[read.position + read.count]


def _int32(values: Sized) -> Int32Array:
    return np.array(values, np.int32)
