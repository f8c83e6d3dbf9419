"""Who gives way when memory runs out: the policy that chooses a running sequence to preempt."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Protocol

from .block_pool import BlockPool
from .sequence import Sequence

MOST_PREEMPTIONS = 4
"""A sequence that was preempted so often is spared while there is another that was not, so that nothing starves."""


class Victim(Protocol):
    def choose(self, running: Collection[Sequence], pool: BlockPool) -> Sequence:
        """The running sequence to preempt. ``running`` is not empty."""
        ...


class LeastWorkLost:
    """Not one that was preempted too often; of the others the least urgent priority; in it the least work lost.

    Lost are the tokens in blocks that no other table names: the others' stay and are found again. One whose blocks are
    all shared frees nothing and is chosen only when that is true of all; it then lets its siblings write their blocks.
    """

    def choose(self, running: Collection[Sequence], pool: BlockPool) -> Sequence:
        in_order = sorted(running, key=lambda sequence: self._key(sequence, pool), reverse=True)
        return next((sequence for sequence in in_order if frees_anything(sequence, pool)), in_order[0])

    @staticmethod
    def _key(sequence: Sequence, pool: BlockPool) -> tuple[bool, int, int, int, int]:
        # Blocks shared with others are the first ones of a table, but for copies of the same content.
        table, count = sequence.block_table, pool.reference_count
        num_own_blocks = len(table) - bisect_left(table, True, key=lambda block: count(block) == 1)
        priority = sequence.request.priority
        return not is_spared(sequence), priority, -num_own_blocks, sequence.arrival, sequence.branch


def is_spared(sequence: Sequence) -> bool:
    """Whether it was preempted too often."""
    return sequence.num_preemptions >= MOST_PREEMPTIONS


def frees_anything(sequence: Sequence, pool: BlockPool) -> bool:
    """Whether its preemption gives back a block."""
    return any(pool.reference_count(block) == 1 for block in reversed(sequence.block_table))


def would_free(sequences: Iterable[Sequence], num_blocks: int, pool: BlockPool, *, kept: Collection[int]) -> bool:
    """Whether the preemption of all ``sequences`` gives back ``num_blocks`` blocks that are not among ``kept``."""
    references = Counter[int]()
    num_freed = 0
    for sequence in sequences:
        references.update(sequence.block_table)
        for block in sequence.block_table:
            num_freed += references[block] == pool.reference_count(block) and block not in kept
        if num_freed >= num_blocks:
            return True
    return False
