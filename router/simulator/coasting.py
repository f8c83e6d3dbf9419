"""CoastingEngine: the production engine, which can skip over steps that do nothing but decode.

While nobody waits who could be let in, all running sequences decode and none of them is about to end, a call of
``Engine.step`` plans what the one before it planned, one token further on. Only what such calls leave behind is done
here, many at once: tokens, a block here and there, the counts. ``test_coasting.py`` holds it against stepping.
"""

from __future__ import annotations

from typing import Any

from ...worker.engine import Engine
from ...worker.routing_hash import RoutingHasher
from ...worker.sequence import Sequence


class CoastingEngine(Engine):
    """For requests of one branch and one priority, that end by their length and get the same token in every step."""

    def __init__(self, *args: Any, hasher: RoutingHasher, **options: Any) -> None:
        super().__init__(*args, **options)
        self._hasher = hasher

    def num_plain_steps(self) -> int:
        """How many of the next calls of ``step`` can be skipped: they would take in a decode of all running sequences,
        end none of them, plan a decode of all again, and find the blocks for it."""
        scheduler, step = self.scheduler, self.step_under_way
        running = scheduler.running
        if step is None or (scheduler.num_waiting and scheduler.num_free_slots) or scheduler.pool.num_fenced_blocks:
            return 0
        if not len(step.sampled) == step.plan.token_ids.size == len(running):
            return 0
        if not all(_goes_on_decoding(sequence) for sequence in running):
            return 0
        num_steps = min(sequence.plan_limit - sequence.num_computed_tokens for sequence in running) - 2
        block_size = scheduler.limits.block_size
        num_blocks = sum(len(_starts_block(sequence, block_size, num_steps)) for sequence in running)
        return num_steps if num_blocks <= scheduler.pool.num_free_blocks else 0

    def num_steps_without_blocks(self) -> int:
        """How many calls can be skipped before the first that needs a block, or makes one findable."""
        size = self.scheduler.limits.block_size
        return min(-sequence.num_computed_tokens % size for sequence in self.scheduler.running)

    def coast(self, times_s: list[float]) -> None:
        """Skip a call of ``step`` at each of ``times_s``, at most ``num_plain_steps`` of them."""
        self.skip_decodes(times_s)
        self._grow(len(times_s))

    def _grow(self, num_steps: int) -> None:
        block_size = self.scheduler.limits.block_size
        calls: dict[int, list[Sequence]] = {}
        for sequence in self.scheduler.running:
            for call in _starts_block(sequence, block_size, num_steps):
                calls.setdefault(call, []).append(sequence)
            sequence.token_ids += sequence.token_ids[-1:] * num_steps
        for call in sorted(calls):  # as a plan does it: first all get their blocks, then those filled are stored
            for sequence in calls[call]:
                sequence.block_table.append(self.scheduler.pool.allocate())
            for sequence in calls[call]:
                self._store(sequence, (sequence.num_computed_tokens + call) // block_size - 1)
        for sequence in self.scheduler.running:
            sequence.num_computed_tokens += num_steps
            sequence.num_sent_blocks = len(sequence.block_table)

    def _store(self, sequence: Sequence, index: int) -> None:
        if sequence.is_cacheable:
            sequence.cache_tail = self.scheduler.cache.store(
                sequence.cache_tail,
                sequence.extra_keys,
                sequence.block_key(index, self.scheduler.limits.block_size),
                sequence.block_table[index],
                sequence.routing_hash(index, self._hasher),
            )
            sequence.num_stored_blocks = index + 1


def _goes_on_decoding(sequence: Sequence) -> bool:
    """Its first token is known, and the one after it that the step under way gives is not its last."""
    has_output = sequence.num_computed_tokens > sequence.num_prompt_tokens
    return has_output and sequence.num_pending_tokens == 1 and not sequence.may_share_tail


def _starts_block(sequence: Sequence, block_size: int, num_steps: int) -> range:
    """Those of the next ``num_steps`` calls that plan the first token of a block."""
    return range(-sequence.num_computed_tokens % block_size, num_steps, block_size)
