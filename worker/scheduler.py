"""Scheduler: which tokens of which sequences the next step computes, and in which blocks.

There is no prefill phase and no decode phase. Each sequence has tokens that are not computed yet: one, while it is
being generated; the rest of its prompt, before that. A step moves as many of them forward as the token budget allows,
running sequences first, then waiting ones. When memory runs out, a running sequence is preempted: its blocks are
released (and stay findable while nobody needs them), and it waits to be computed again, output included.

Plain Python: no torch, no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from .block_pool import BlockPool
from .errors import ContextLengthExceeded
from .messages import BlocksRemoved, BlocksStored, FinishReason
from .plan_builder import PlanBuilder, ScheduledStep
from .policies import LeastWorkLost, Order, PriorityOrder, Victim
from .prefix_cache import CacheNode, PrefixCache
from .routing_hash import RoutingHasher
from .sequence import Sequence, SequenceStatus
from .waiting_queue import WaitingQueue

_STEP_NUMBERS = 2**31
"""Steps are numbered in int32 on the wire, round and round."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one worker group, all ≥ 1."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start, in tokens unless named otherwise."""

    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_queried_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0


class Scheduler:
    """Owns the block pool, the prefix cache and the order of all sequences of one worker group."""

    def __init__(
        self,
        limits: SchedulerLimits,
        hasher: RoutingHasher,
        *,
        order: Order | None = None,
        victim: Victim | None = None,
    ) -> None:
        self.limits = limits
        self.counters = SchedulerCounters()
        self.pool = BlockPool(limits.num_blocks)
        self.cache = PrefixCache(self.pool)
        self._hasher = hasher
        self._victim = victim or LeastWorkLost()
        self._waiting = WaitingQueue(order or PriorityOrder())
        self._running: dict[int, Sequence] = {}
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._num_uncomputed_prompt_tokens = 0
        self._num_steps = 0

    # ---- what comes in ----

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises ContextLengthExceeded when such a sequence could never be finished here."""
        total = num_prompt_tokens + max_tokens
        if total > self.limits.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: together {total}, "
                f"but the context is {self.limits.max_model_len} tokens",
                param="max_tokens",
            )
        if self._blocks_for(total) > self.limits.num_blocks:
            raise ContextLengthExceeded(
                f"{total} tokens need {self._blocks_for(total)} KV blocks of {self.limits.block_size} tokens, "
                f"but the pool has {self.limits.num_blocks}",
                param="max_tokens",
            )

    def add(self, sequence: Sequence) -> None:
        """Let ``sequence`` wait. It has passed ``check_fits``."""
        self._num_uncomputed_prompt_tokens += sequence.num_prompt_tokens
        self._wait(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End ``sequence`` from any state and give back what it holds; harmless when it has ended."""
        before, sequence.status = sequence.status, SequenceStatus.FINISHED
        if before is SequenceStatus.FINISHED:
            return
        if before is SequenceStatus.RUNNING:
            self._stop_running(sequence)
        else:
            self._waiting.note_end()
        self._num_uncomputed_prompt_tokens -= sequence.num_prompt_tokens
        sequence.finish_reason = reason

    # ---- one step ----

    def plan(self) -> ScheduledStep | None:
        """The next step, or None when there is nothing to compute.

        The plan counts as carried out: steps run in order on every rank, so a later plan may build on its K and V.
        """
        builder = PlanBuilder()
        budget, preempted = self._plan_running(builder, self.limits.max_num_batched_tokens)
        if not preempted:
            self._admit_waiting(builder, budget)
        if not len(builder):
            return None
        self._num_steps = (self._num_steps + 1) % _STEP_NUMBERS
        return builder.build(self._num_steps)

    def _plan_running(self, builder: PlanBuilder, budget: int) -> tuple[int, bool]:
        """Running sequences, in the order of their admission. The budget left, and whether memory ran out."""
        preempted = False
        for sequence in list(self._running.values()):
            if budget == 0:
                break
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted by one before it
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            while not self._allocate(sequence, num_tokens):
                victim = self._victim.choose(self._running.values())
                budget += self._preempt(victim, builder)
                preempted = True
                if victim is sequence:
                    break
            else:
                self._schedule(sequence, num_tokens, builder)
                budget -= num_tokens
        # Not before here: a sequence that is preempted after it was scheduled never writes its new blocks.
        self._store_full_blocks(self._running.values())
        return budget, preempted

    def _admit_waiting(self, builder: PlanBuilder, budget: int) -> None:
        """Waiting sequences in the policy's order, until one does not fit: a long one is not starved by short ones."""
        while budget > 0 and self._free_slots:
            sequence = self._waiting.first()
            if sequence is None:
                return
            found = self._find_cached(sequence)
            if not self._can_admit(sequence, found):
                return
            self._admit(sequence, found)
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            self._allocate(sequence, num_tokens)
            self._schedule(sequence, num_tokens, builder)
            self._store_full_blocks((sequence,))
            budget -= num_tokens

    def _schedule(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> None:
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens = start + num_tokens
        builder.add(sequence, num_tokens)
        if start < sequence.num_prompt_tokens:
            self._num_uncomputed_prompt_tokens -= min(num_tokens, sequence.num_prompt_tokens - start)

    # ---- memory ----

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)

    def _allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for the next ``num_tokens`` of ``sequence``; False, and nothing changed, when there are not enough."""
        need = self._blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.block_table)
        if need > 0:
            if need > self.pool.num_free_blocks:
                return False
            sequence.block_table += [self.pool.allocate() for _ in range(need)]
        return True

    def _find_cached(self, sequence: Sequence) -> list[CacheNode]:
        """Cached blocks of its prefix. At least one token is left to compute, since its logits are needed."""
        if not self.limits.enable_prefix_caching:
            return []
        num_blocks = (sequence.num_tokens - 1) // self.limits.block_size
        keys = sequence.block_keys(self.limits.block_size, num_blocks)
        return self.cache.match(sequence.extra_keys, keys)

    def _can_admit(self, sequence: Sequence, found: list[CacheNode]) -> bool:
        """All tokens known now must fit, so that an admitted prompt does not preempt others half way."""
        new = self._blocks_for(sequence.num_tokens) - len(found)
        revived = sum(self.cache.is_unused(node) for node in found)
        return new + revived <= self.pool.num_free_blocks

    def _admit(self, sequence: Sequence, found: list[CacheNode]) -> None:
        self._waiting.remove_first()
        sequence.block_table += [self.cache.take(node) for node in found]
        sequence.num_computed_tokens = len(found) * self.limits.block_size
        self._num_uncomputed_prompt_tokens -= min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        sequence.num_stored_blocks = len(found)
        sequence.cache_tail = found[-1] if found else None
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self.counters.num_queried_prompt_tokens += sequence.num_prompt_tokens
            self.counters.num_cached_prompt_tokens += sequence.num_cached_tokens
        sequence.slot = self._free_slots.pop()
        sequence.status = SequenceStatus.RUNNING
        self._running[id(sequence)] = sequence

    def _store_full_blocks(self, sequences: Iterable[Sequence]) -> None:
        """Make the blocks that this step fills findable: sequences planned later, even in this step, may share them.

        Within a step every layer writes all K and V before any query reads them.
        """
        if not self.limits.enable_prefix_caching:
            return
        size = self.limits.block_size
        for sequence in sequences:
            num_full = sequence.num_computed_tokens // size
            while sequence.num_stored_blocks < num_full:
                self._store(sequence, sequence.num_stored_blocks)
                sequence.num_stored_blocks += 1

    def _store(self, sequence: Sequence, index: int) -> None:
        sequence.cache_tail = self.cache.store(
            sequence.cache_tail,
            sequence.extra_keys,
            sequence.block_key(index, self.limits.block_size),
            sequence.block_table[index],
            sequence.routing_hash(index, self._hasher),
        )

    # ---- state changes ----

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        self._waiting.add(sequence)

    def _preempt(self, sequence: Sequence, builder: PlanBuilder) -> int:
        """Back to waiting. The tokens that it had in the step being planned, which are not computed."""
        num_planned = builder.remove(sequence)
        self.counters.num_preemptions += 1
        self.counters.num_recomputed_tokens += sequence.num_computed_tokens - num_planned
        sequence.num_preemptions += 1
        self._stop_running(sequence)
        self._wait(sequence)
        return num_planned

    def _stop_running(self, sequence: Sequence) -> None:
        self._num_uncomputed_prompt_tokens += min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        self.pool.release_all(sequence.block_table)
        sequence.block_table.clear()
        sequence.num_computed_tokens = sequence.num_stored_blocks = sequence.num_sent_blocks = 0
        sequence.cache_tail = None
        del self._running[id(sequence)]
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None

    # ---- what can be seen ----

    @property
    def running(self) -> Collection[Sequence]:
        """The sequences of the batch, in the order of their admission."""
        return self._running.values()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_uncomputed_prompt_tokens(self) -> int:
        """Prefill work accepted and not done: of running sequences, and of waiting ones as if nothing were cached."""
        return self._num_uncomputed_prompt_tokens

    def drain_events(self) -> tuple[BlocksStored | BlocksRemoved, ...]:
        """Changes of what the prefix cache holds since the last call."""
        return self.cache.drain_events()

    def check(self) -> None:
        """Prove every invariant. Raises RuntimeError on the first that is broken."""
        running = list(self._running.values())
        waiting = list(self._waiting)
        self.pool.check([sequence.block_table for sequence in running])
        self.cache.check([content for sequence in running for content in self._contents(sequence)])
        self._check_slots(running)
        self._check_waiting(waiting)
        for sequence in running:
            self._check_table(sequence)
        left = sum(max(0, s.num_prompt_tokens - s.num_computed_tokens) for s in running + waiting)
        if left != self._num_uncomputed_prompt_tokens:
            raise RuntimeError(
                f"{left} prompt tokens are to be computed, but {self._num_uncomputed_prompt_tokens} counted"
            )

    def _contents(self, sequence: Sequence) -> Iterator[tuple[int, bytes]]:
        size = self.limits.block_size
        keys = sequence.block_keys(size, sequence.num_computed_tokens // size)
        return zip(sequence.block_table, keys, strict=False)

    def _check_slots(self, running: list[Sequence]) -> None:
        slots = self._free_slots + [sequence.slot for sequence in running if sequence.slot is not None]
        if sorted(slots) != list(range(self.limits.max_num_seqs)):
            raise RuntimeError("the slots of the persistent batch are not each free or held by one sequence")

    def _check_waiting(self, waiting: list[Sequence]) -> None:
        if len(waiting) != len(self._waiting):
            raise RuntimeError(f"{len(waiting)} sequences wait, but {len(self._waiting)} are counted")
        if any(s.block_table or s.num_computed_tokens or s.slot is not None for s in waiting):
            raise RuntimeError("a waiting sequence holds blocks or a slot")

    def _check_table(self, sequence: Sequence) -> None:
        name = sequence.request.request_id
        if sequence.status is not SequenceStatus.RUNNING:
            raise RuntimeError(f"{name} is in the batch and {sequence.status.value}")
        if self._blocks_for(sequence.num_computed_tokens) > len(sequence.block_table):
            raise RuntimeError(f"{name} has computed tokens that lie in no block")
        writable = sequence.block_table[sequence.num_computed_tokens // self.limits.block_size :]
        if any(self.pool.reference_count(block) != 1 for block in writable):
            raise RuntimeError(f"{name} could write into a block that another block table names")
