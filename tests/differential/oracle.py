"""Oracle: the logits that follow a prompt and given further tokens, computed without scheduler, pool or cache.

Teacher forcing: the prompt is computed once, then all further tokens of several continuations in one pass. The logits
are those that a run alone draws from, up to rounding, for a fraction of its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from lab import BLOCK_SIZE, MAX_MODEL_LEN, Lab
from torch import Tensor

from octavo.worker.step_plan import PlanKind, StepPlan

_NUM_BLOCKS = 160
_MOST_CONTINUATIONS = 32
_MOST_ROWS = 256
"""Of logits in one pass: 50 MB."""

Tokens = tuple[int, ...]


class Oracle:
    """Blocks from 0 on hold the last prompt that was asked for; those after it are given out anew for each pass.

    The prompt has slot 0 of the runner's tables, continuations the others.
    """

    def __init__(self, lab: Lab) -> None:
        self._runner = lab.runner(
            _NUM_BLOCKS, max_num_seqs=1 + _MOST_CONTINUATIONS, max_num_batched_tokens=MAX_MODEL_LEN
        )
        self._prompt: Tokens = ()

    def logits(self, prompt: Tokens, continuations: Sequence[Tokens]) -> Iterator[Tensor]:
        """For each continuation of c tokens float32 ``[c + 1, vocabulary]``: after the prompt, and after each of them.

        Raises ValueError for one that is too long for the memory of this oracle.
        """
        if prompt != self._prompt:
            self._compute_prompt(prompt)
        for batch in self._batches(continuations):
            yield from self._compute(batch)

    def _compute_prompt(self, prompt: Tokens) -> None:
        blocks = range(_blocks_for(len(prompt)))
        self._execute([0], [prompt], 0, [blocks], copies=[], logit_indices=[len(prompt) - 1])
        self._prompt = prompt

    def _num_own_blocks(self, continuation: Tokens) -> int:
        """All from the one on that the prompt's last token is written to: it is computed again for each."""
        return _blocks_for(len(self._prompt) + len(continuation)) - self._num_shared_blocks

    @property
    def _num_shared_blocks(self) -> int:
        return (len(self._prompt) - 1) // BLOCK_SIZE

    def _batches(self, continuations: Sequence[Tokens]) -> Iterator[list[Tokens]]:
        most_blocks = _NUM_BLOCKS - _blocks_for(len(self._prompt))
        batch: list[Tokens] = []
        for continuation in continuations:
            grown = [*batch, continuation]
            fits = (
                len(grown) <= _MOST_CONTINUATIONS
                and sum(map(len, grown)) + len(grown) <= _MOST_ROWS
                and sum(map(self._num_own_blocks, grown)) <= most_blocks
            )
            if not fits and not batch:
                raise ValueError(f"a continuation of {len(continuation)} tokens is too long")
            if not fits:
                yield batch
            batch = grown if fits else [continuation]
        if batch:
            yield batch

    def _compute(self, continuations: list[Tokens]) -> Sequence[Tensor]:
        last, begin = len(self._prompt) - 1, _blocks_for(len(self._prompt))
        tables = []
        for continuation in continuations:
            end = begin + self._num_own_blocks(continuation)
            tables.append([*range(self._num_shared_blocks), *range(begin, end)])
            begin = end
        is_copied = last % BLOCK_SIZE > 0
        copies = [(self._num_shared_blocks, table[self._num_shared_blocks]) for table in tables] if is_copied else []
        tokens = [(self._prompt[-1], *continuation) for continuation in continuations]
        num_rows = sum(map(len, tokens))
        slots = range(1, 1 + len(tokens))
        logits = self._execute(slots, tokens, last, tables, copies=copies, logit_indices=range(num_rows))
        return torch.split(logits, [len(each) for each in tokens])

    def _execute(
        self,
        slots: Sequence[int],
        tokens: Sequence[Tokens],
        num_computed: int,
        tables: Sequence[Sequence[int]],
        *,
        copies: Sequence[tuple[int, int]],
        logit_indices: Sequence[int],
    ) -> Tensor:
        plan = StepPlan(
            PlanKind.STEP,
            slots=np.array(slots, np.int32),
            num_new_tokens=np.array([len(each) for each in tokens], np.int32),
            num_computed_tokens=np.full(len(tokens), num_computed, np.int32),
            token_ids=np.array([token for each in tokens for token in each], np.int32),
            table_updates=np.array(
                [(slot, 0, len(table)) for slot, table in zip(slots, tables, strict=True)], np.int32
            ),
            table_blocks=np.array([block for table in tables for block in table], np.int32),
            copies=np.array(copies, np.int32).reshape(-1, 2),
            logit_indices=np.array(logit_indices, np.int32),
        )
        logits = self._runner.execute(plan)
        assert logits is not None
        assert not torch.isnan(logits).any()
        return logits


def _blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)
