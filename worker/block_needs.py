"""BlockNeeds: how many blocks must be there for a waiting sequence to be let in, and whether others can make room.

Admitted is what fits with all its tokens known now, beside what prompts under way still need and a head-room for the
growth of what runs: a sequence let in without that would soon cost a preemption.
"""

from __future__ import annotations

from .head_room import HeadRoom
from .kv_memory import KvMemory, Prefix
from .preemption import would_free
from .running_batch import RunningBatch
from .sequence import Sequence


class BlockNeeds:
    """Reads the memory and the batch; changes neither."""

    def __init__(self, memory: KvMemory, batch: RunningBatch, head_room: HeadRoom) -> None:
        self._memory = memory
        self._batch = batch
        self._head_room = head_room
        self._could_not_free: tuple[int, int, int] | None = None
        """For which victims and how many blocks it was last found that they would not be freed."""

    def to_admit(self, sequence: Sequence, prefix: Prefix) -> int:
        """Blocks that must be free: for all tokens known now, one for each branch that is forked then, the other
        prompts under way, and the growth of what runs. With none but beams of its own search beside it, all that
        counts is the pool."""
        needed = self._memory.num_blocks_to_take(sequence, prefix)
        others = self._batch.sequences
        if not others or (sequence.is_beam and all(other.request is sequence.request for other in others)):
            return needed
        num_forks = min(len(sequence.unforked_branches), self._batch.num_free_slots)
        needed += num_forks + self._num_promised_blocks() + self.head_room_blocks
        return min(needed, self._memory.pool.num_blocks)

    def _num_promised_blocks(self) -> int:
        """Blocks that prompts under way will still need."""
        return sum(
            self._memory.blocks_for(sequence.num_tokens) - len(sequence.block_table)
            for sequence in self._batch.sequences
            if sequence.num_uncomputed_tokens > 1
        )

    @property
    def head_room_blocks(self) -> int:
        """Blocks that are kept for the growth of running sequences when another one asks to be admitted."""
        running = self._batch.sequences
        num_held_tokens = self._memory.pool.num_held_blocks * self._memory.block_size
        num_to_come = sum(sequence.num_tokens_to_come for sequence in running)
        return self._memory.blocks_for(self._head_room.tokens(len(running), num_held_tokens, num_to_come))

    @property
    def coming_blocks(self) -> int:
        """Blocks that can be had: now, or when the steps under way are over."""
        pool = self._memory.pool
        return pool.num_free_blocks + pool.num_fenced_blocks

    def has_room(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Whether ``sequence`` could be admitted once the steps under way are over."""
        return self._batch.num_free_slots > 0 and self.to_admit(sequence, prefix) <= self.coming_blocks

    def could_get_in(self, sequence: Sequence, prefix: Prefix, victims: list[Sequence]) -> bool:
        """Whether it fits when ``victims`` give way. They are asked anew only when the pool has changed by some
        blocks: that reads all their tables."""
        missing = self.to_admit(sequence, prefix) - self.coming_blocks
        if missing <= 0:
            return True
        state = (id(victims[0]), len(victims), missing)
        if self._could_not_free != state:
            self._could_not_free = None
            if not would_free(victims, missing, self._memory.pool, kept=set(prefix.blocks)):
                self._could_not_free = state
        return self._could_not_free is None
