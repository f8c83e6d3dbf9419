"""Scheduler: which tokens of which sequences the next step computes, and in which blocks.

There is no prefill phase and no decode phase. Each sequence has tokens that are not computed yet: one, while it is
being generated; the rest of its prompt, before that. A step gives every running sequence that is being generated its
token, and what is left of the budget to prompts: of running sequences first, then of waiting ones. When memory runs
out, a running sequence is preempted: its blocks are released (and stay findable while nobody needs them), and it waits
to be computed again, output included.

A step may be planned while the one before it runs. Steps run in order on every rank, so a plan counts as carried out:
a later one may build on its K and V, and refer to its tokens before they are known.

Plain Python: no torch, no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from .block_needs import BlockNeeds
from .block_pool import BlockPool
from .errors import ContextLengthExceeded, InvalidRequest
from .head_room import HeadRoom
from .kv_memory import KvMemory, Prefix
from .messages import FinishReason, Request
from .plan_builder import PlanBuilder, ScheduledStep
from .policies import make_queue
from .preemption import LeastWorkLost, Victim, is_spared
from .prefix_cache import CacheEvent, PrefixCache
from .routing_hash import RoutingHasher
from .running_batch import RunningBatch
from .sequence import Sequence, SequenceStatus
from .token_budget import FixedBudget, TokenBudget
from .waiting_queue import WaitingQueue, expected_prefill_tokens
from .waiting_room import WaitingRoom

_LOOK_AHEAD = 16
"""Waiting sequences that are looked at for one that is short beside the prompt under way."""

_MUCH_SHORTER = 2
"""A prompt is short beside another one that has so many times the tokens to compute."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one worker group, all ≥ 1."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    plans_ahead: bool = False
    """A step may be planned before ``complete`` was called for the one before it."""


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start, in tokens unless named otherwise."""

    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_queried_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_forks: int = 0
    num_copied_blocks: int = 0
    num_prefix_waits: int = 0
    """Times that a sequence waited for another one that was computing its prefix."""


class Scheduler:
    """Owns the KV memory and the order of all sequences of one worker group."""

    def __init__(
        self,
        limits: SchedulerLimits,
        hasher: RoutingHasher,
        *,
        queue: WaitingQueue | None = None,
        budget: TokenBudget | None = None,
        head_room: HeadRoom | None = None,
        victim: Victim | None = None,
    ) -> None:
        self.limits = limits
        self.counters = SchedulerCounters()
        self._memory = KvMemory(
            limits.num_blocks, limits.block_size, hasher, enable_prefix_caching=limits.enable_prefix_caching
        )
        queue = make_queue("priority") if queue is None else queue
        self._waiting = WaitingRoom(queue, limits.block_size)
        self._budget = budget or FixedBudget(limits.max_num_batched_tokens)
        self._head_room = head_room or HeadRoom(limits.block_size)
        self._victim = victim or LeastWorkLost()
        self._batch = RunningBatch(limits.max_num_seqs)
        self._needs = BlockNeeds(self._memory, self._batch, self._head_room)
        self._num_uncomputed_prompt_tokens = 0
        self._num_steps = 0
        self._num_completed_steps = 0
        self._placed: list[Sequence] = []
        """Running sequences that may fill a block in the step being planned."""
        self._admitted: list[Sequence] = []
        """For the first time, and no step says so yet."""
        self._num_claimed_blocks = 0
        """Fenced blocks that running sequences passed over in this plan wait for."""

    # ---- what comes in ----

    def check_fits(self, num_prompt_tokens: int, max_tokens: int, beam_width: int | None = None) -> None:
        """Raises InvalidRequest when such a request could never be finished here."""
        total = num_prompt_tokens + max_tokens
        if total > self.limits.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: together {total}, "
                f"but the context is {self.limits.max_model_len} tokens",
                param="max_tokens",
            )
        width = beam_width or 1
        if width > self.limits.max_num_seqs:
            raise InvalidRequest(
                f"beam_width is {width}, but --max-num-seqs is {self.limits.max_num_seqs}", param="beam_width"
            )
        # Beams must all be there at once, and share at least the full blocks of the prompt. Branches need not.
        shared = num_prompt_tokens // self.limits.block_size if width > 1 else 0
        needed = shared + width * (self._memory.blocks_for(total) - shared)
        if needed > self.limits.num_blocks:
            beams = f" for each of {width} beams" if width > 1 else ""
            raise ContextLengthExceeded(
                f"{total} tokens{beams} need {needed} KV blocks of {self.limits.block_size} tokens, "
                f"but the pool has {self.limits.num_blocks}",
                param="max_tokens",
            )

    def add(self, sequence: Sequence) -> None:
        """Let ``sequence`` wait. It has passed ``check_fits``."""
        self._num_uncomputed_prompt_tokens += sequence.num_prompt_tokens
        self._waiting.enter_new(sequence)

    def fork(self, parent: Sequence, branch: int) -> Sequence:
        """Another branch of what ``parent`` is so far. It shares every block, the partly filled last one too.

        It waits, and holds nothing, when its parent waits or there is no slot for it.
        """
        child = parent.fork(branch)
        self.counters.num_forks += 1
        if parent.status is SequenceStatus.RUNNING and self._batch.num_free_slots:
            self._memory.fork(parent, child)
            self._batch.enter(child)
        else:
            self._waiting.enter(child)
        self._num_uncomputed_prompt_tokens += max(0, child.num_prompt_tokens - child.num_computed_tokens)
        return child

    def complete(self, step: ScheduledStep) -> None:
        """``step`` is over on all ranks. Steps end in the order in which they were planned."""
        self._num_completed_steps = step.number
        self.pool.lift_fence(step.number)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End ``sequence`` from any state and give back what it holds; harmless when it has ended."""
        before, sequence.status = sequence.status, SequenceStatus.FINISHED
        if before is SequenceStatus.FINISHED:
            return
        if before is SequenceStatus.RUNNING:
            self._store_full_blocks((sequence,))  # the last one, whose end was not known when it was planned
            self._stop_running_for_heir(sequence)
        else:
            self._waiting.end(sequence)
        sequence.finish_reason = reason
        self._num_uncomputed_prompt_tokens -= sequence.num_prompt_tokens
        if sequence.draws and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.note_length(sequence)

    def note_length(self, sequence: Sequence) -> None:
        """Its output is as long as it was to be: what is kept for the growth of others is learned from that."""
        self._head_room.note_finished(len(sequence.token_ids) - sequence.num_prompt_tokens)

    def reset_prefix_cache(self) -> int:
        """Forget all cached content; the number of blocks forgotten. What runs goes on and stores nothing more."""
        for sequence in self._batch.sequences:
            self._waiting.stop(sequence)
            sequence.is_cacheable = False
            sequence.cache_tail = None
        return self.cache.clear()

    # ---- one step ----

    def plan(self) -> ScheduledStep | None:
        """The next step, or None when there is nothing to compute before a step under way is over."""
        while True:
            builder = self._compose()
            if len(builder):
                return self._build(builder)
            self._release_sources(builder)  # of copies for sequences that were preempted after it
            if not self._break_stand_still():
                return None

    def _compose(self) -> PlanBuilder:
        builder = PlanBuilder()
        self._placed = []
        self._num_claimed_blocks = 0
        self._memory.begin_plan()
        self._make_way()
        num_preemptions = self.counters.num_preemptions
        prompts = self._plan_decodes(builder)
        end = builder.num_tokens + self._budget.num_prefill_tokens(builder.num_tokens, self._first_context(prompts))
        long = self._plan_prompts(builder, prompts, end)
        # Not before here: a sequence that is preempted after it was scheduled never writes its new blocks.
        self._store_full_blocks(self._placed)
        if num_preemptions == self.counters.num_preemptions or not len(builder):
            self._admit_waiting(builder, end, long)
        elif long is not None:
            self._extend(long, end - builder.num_tokens, builder)  # nobody takes the share that it left
        return builder

    def _plan_decodes(self, builder: PlanBuilder) -> list[Sequence]:
        """One token for each running sequence that has one to compute. Those that have more, the most urgent first."""
        size, most, prompts = self.limits.block_size, self.limits.max_num_batched_tokens, []
        for sequence in list(self._batch.sequences):
            start = sequence.num_computed_tokens
            num_tokens = len(sequence.token_ids) + sequence.num_pending_tokens - start
            if num_tokens != 1:
                if num_tokens and sequence.status is SequenceStatus.RUNNING:
                    prompts.append(sequence)
            elif builder.num_tokens >= most:
                break
            elif 0 < start % size < size - 1 and start >= sequence.num_prompt_tokens and not sequence.may_share_tail:
                # The case of nearly every decode: within a block of its own, which it does not fill.
                sequence.num_computed_tokens = start + 1
                builder.add_decode(sequence)
            else:
                self._place(sequence, 1, builder)
        if len(prompts) > 1:
            prompts.sort(key=lambda sequence: (sequence.urgency, sequence.arrival, sequence.branch))
        return prompts

    def _first_context(self, prompts: list[Sequence]) -> int:
        """Tokens before the first token of prefill; where it is of a waiting prompt, those likely to be cached."""
        for sequence in prompts:
            if sequence.status is SequenceStatus.RUNNING:
                return sequence.num_computed_tokens
        first = self._first_waiting() if self._batch.num_free_slots else None
        return 0 if first is None else first.num_expected_cached_tokens

    def _plan_prompts(self, builder: PlanBuilder, prompts: list[Sequence], end: int) -> Sequence | None:
        """Running sequences with more than one token to compute, until the step has ``end`` tokens.

        The first that cannot be finished in this step is the long one, which is returned. It leaves half of what there
        is to others that are much shorter, so that those need not wait for all of it, and it is not starved by them.
        """
        long: Sequence | None = None
        for sequence in prompts:
            left, num_tokens = end - builder.num_tokens, sequence.num_uncomputed_tokens
            if left <= 0:
                break
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted by one before it
            if long is None and num_tokens > left:
                long = sequence
                self._place(sequence, left - self._share_beside(long, prompts, left), builder)
            elif long is None or _is_short_beside(num_tokens, long):
                self._place(sequence, min(num_tokens, left), builder)
        return long

    def _share_beside(self, long: Sequence, prompts: Iterable[Sequence], num_tokens: int) -> int:
        """What ``long`` leaves of ``num_tokens`` to others: nearly all of it to one more urgent that waits."""
        may_pass = list(self._may_pass(long)) if self._batch.num_free_slots else []
        if any(sequence.request.priority < long.urgency for sequence in may_pass):
            return num_tokens - 1
        running = (sequence for sequence in prompts if sequence.status is SequenceStatus.RUNNING)
        is_shared = may_pass or any(_is_short_beside(sequence.num_uncomputed_tokens, long) for sequence in running)
        return num_tokens // 2 if is_shared else 0

    def _may_pass(self, long: Sequence) -> Iterator[Sequence]:
        """Waiting sequences that are much shorter than the prompt under way, or more urgent."""
        for sequence in self._waiting.in_order(_LOOK_AHEAD):
            is_urgent = sequence.request.priority < long.urgency
            if is_urgent or _is_short_beside(expected_prefill_tokens(sequence), long):
                yield sequence

    def _admit_waiting(self, builder: PlanBuilder, end: int, long: Sequence | None) -> None:
        """Waiting sequences in the policy's order, until one does not fit: a large one is not starved by small ones.

        Beside a long prompt only much shorter or more urgent ones; what they leave of the budget is the long one's.
        """
        while long is None and builder.num_tokens < end:
            sequence = self._admit_first()
            if sequence is None:
                return
            num_tokens, left = sequence.num_uncomputed_tokens, end - builder.num_tokens
            if num_tokens > left:
                long = sequence
                left -= self._share_beside(long, (), left)
            self._begin(sequence, min(num_tokens, left), builder)
        if long is not None and builder.num_tokens < end:
            self._admit_beside(long, builder, end)
            self._extend(long, end - builder.num_tokens, builder)

    def _admit_first(self) -> Sequence | None:
        """The first waiting sequence, admitted; None if it does not fit. Passes over those that follow another one."""
        while self._batch.num_free_slots and (sequence := self._first_waiting()) is not None:
            prefix = self._memory.find_prefix(sequence)
            if not self._follow(sequence, prefix):
                return sequence if self._admit(sequence, prefix) else None
        return None

    def _admit_beside(self, long: Sequence, builder: PlanBuilder, end: int) -> None:
        for sequence in list(self._may_pass(long)):
            left = end - builder.num_tokens
            if left <= 0 or not self._batch.num_free_slots:
                return
            prefix = self._memory.find_prefix(sequence)
            if not self._follow(sequence, prefix):
                if not self._admit(sequence, prefix):
                    return
                self._begin(sequence, min(sequence.num_uncomputed_tokens, left), builder)

    def _begin(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> None:
        """First tokens of a sequence just admitted. Those planned after it may share what it fills."""
        if not self._memory.allocate(sequence, num_tokens, builder):
            raise RuntimeError(f"{sequence.request.request_id} was admitted, but there are no blocks for it")
        self._schedule(sequence, num_tokens, builder)
        self._store_full_blocks((sequence,))

    def _extend(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> None:
        """More tokens of a sequence of this step, if there are blocks for them without preempting anybody."""
        num_tokens = min(num_tokens, sequence.num_uncomputed_tokens)
        if num_tokens > 0 and sequence in builder and self._memory.allocate(sequence, num_tokens, builder):
            self._schedule(sequence, num_tokens, builder)
            self._store_full_blocks((sequence,))

    def _place(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> None:
        """The next ``num_tokens`` of a running sequence, at the cost of others if need be.

        It may be preempted itself, or passed over when the steps under way give back the blocks that it lacks.
        """
        if sequence.status is not SequenceStatus.RUNNING:
            return  # preempted by one before it
        while not self._memory.allocate(sequence, num_tokens, builder):
            if self._can_wait_for_fenced(sequence, num_tokens, builder):
                return
            victim = self._victim.choose(self._batch.sequences, self.pool)
            self._preempt(victim, builder)
            if victim is sequence:
                return
        self._schedule(sequence, num_tokens, builder)
        self._placed.append(sequence)

    def _schedule(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> None:
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens = start + num_tokens
        builder.add(sequence, num_tokens)
        if start < sequence.num_prompt_tokens:
            self._num_uncomputed_prompt_tokens -= min(num_tokens, sequence.num_prompt_tokens - start)

    def _store_full_blocks(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if self._memory.store_full_blocks(sequence):
                self._waiting.advance(sequence)

    def _build(self, builder: PlanBuilder) -> ScheduledStep:
        self._num_steps += 1
        self.pool.set_fence(self._num_steps)
        self._release_sources(builder)
        self.counters.num_copied_blocks += builder.num_copies
        forks = self._fork_branches(builder) if self._batch.unforked else {}
        step = builder.build(
            self._num_steps,
            forks,
            plans_ahead=self.limits.plans_ahead,
            reads_prompts=self._batch.reads_prompts,
            admitted=tuple(self._admitted),
        )
        self._admitted.clear()
        self._waiting.count_service(step)
        return step

    def _release_sources(self, builder: PlanBuilder) -> None:
        for block in builder.sources:
            self.pool.release(block)

    def _fork_branches(self, builder: PlanBuilder) -> dict[Sequence, list[Sequence]]:
        """The branches that begin with this step: their prompt is computed to its end."""
        begin = [s for s in builder if s.unforked_branches and s.draws and s.num_uncomputed_tokens == 0]
        return {s: [self.fork(s, branch) for branch in self._batch.take_unforked(s)] for s in begin}

    # ---- memory ----

    def _can_wait_for_fenced(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> bool:
        """Whether what it lacks comes back when the steps under way are over. Preempting others would bring no more."""
        missing = self._memory.num_missing_blocks(sequence, num_tokens, builder) - self.pool.num_free_blocks
        if self._num_claimed_blocks + missing > self.pool.num_fenced_blocks:
            return False
        self._num_claimed_blocks += missing
        return True

    # ---- admission ----

    def _first_waiting(self) -> Sequence | None:
        """The next in the policy's order; before all others a beam of a search that runs.

        A search goes on when all of its beams are there. If two took turns at getting theirs, neither ever would: of
        several the most urgent, then the earliest comes first until it has them.
        """
        beams = [beam for beam in self._waiting.beams if self._batch.has_beams_of(beam.request.request_id)]
        if beams:
            return min(beams, key=lambda beam: (beam.request.priority, beam.arrival, beam.branch))
        return self._waiting.first()

    def _follow(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Let it wait for a running sequence that is about to compute its next block; False if there is none."""
        if not self._memory.may_use_cache(sequence):
            return False
        leader = self._waiting.leader_of(sequence, prefix)
        if leader is None:
            return False
        self._waiting.follow(sequence, leader)
        self.counters.num_prefix_waits += 1
        return True

    def _admit(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Take ``sequence`` into the batch, with the blocks of ``prefix``; False if it does not fit."""
        if self._needs.to_admit(sequence, prefix) > self.pool.num_free_blocks:
            return False
        self._enter_batch(sequence, prefix)
        return True

    def _enter_batch(self, sequence: Sequence, prefix: Prefix) -> None:
        self._waiting.admit(sequence)
        self._memory.take(sequence, prefix)
        self.counters.num_recomputed_tokens += max(0, sequence.num_given_up_tokens - sequence.num_computed_tokens)
        sequence.num_given_up_tokens = 0
        self._num_uncomputed_prompt_tokens -= min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        if not sequence.was_admitted:
            self._note_first_admission(sequence)
        self._batch.enter(sequence)
        self._waiting.advance(sequence)

    def _note_first_admission(self, sequence: Sequence) -> None:
        sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        self._admitted.append(sequence)
        if self._memory.may_use_cache(sequence):
            self.counters.num_queried_prompt_tokens += sequence.num_prompt_tokens
            self.counters.num_cached_prompt_tokens += sequence.num_cached_tokens

    def _make_way(self) -> None:
        """Preempt what is less urgent than the first waiting sequence, when that gets it in.

        This comes before anything is planned: in a step being planned, blocks are findable that a victim would not
        write.
        """
        sequence = self._first_waiting() if self._batch else None
        if sequence is None:
            return
        less_urgent = [other for other in self._batch.sequences if self._gives_way(other, sequence)]
        if not less_urgent:
            return
        prefix = self._memory.find_prefix(sequence)
        if self._memory.may_use_cache(sequence) and self._waiting.leader_of(sequence, prefix):
            return
        if not self._needs.could_get_in(sequence, prefix, less_urgent):
            return
        while less_urgent and not self._needs.has_room(sequence, prefix):
            victim = self._victim.choose(less_urgent, self.pool)
            less_urgent.remove(victim)
            self._preempt(victim)

    def _gives_way(self, running: Sequence, waiting: Sequence) -> bool:
        """Less urgent, not spared, and, once it waits too, behind the other one: else it would come back at once."""
        is_less_urgent = running.request.priority > waiting.request.priority
        return is_less_urgent and not is_spared(running) and self._waiting.precedes(waiting, running)

    def _break_stand_still(self) -> bool:
        """Nothing could be planned. If that would not change by itself, preempt what cannot go on; whether it did.

        That is a beam that waits for the others of its search, which wait for memory.
        """
        sequence = self._first_waiting()
        if sequence is None or self._num_steps > self._num_completed_steps:
            return False
        if not self._batch:
            raise RuntimeError(f"{sequence.request.request_id} does not fit into an empty pool")
        others = [other for other in self._batch.sequences if other.request is not sequence.request]
        # With nobody else running, all beams of that search begin anew: they then share all that they can.
        victims = [self._victim.choose(others, self.pool)] if others else list(self._batch.sequences)
        for victim in victims:
            self._preempt(victim)
        return True

    # ---- state changes ----

    def _preempt(self, sequence: Sequence, builder: PlanBuilder | None = None) -> None:
        """Back to waiting. What it had in the step being planned is not computed."""
        num_planned = builder.remove(sequence) if builder is not None else 0
        self.counters.num_preemptions += 1
        sequence.num_given_up_tokens = sequence.num_computed_tokens - num_planned
        sequence.num_preemptions += 1
        self._stop_running(sequence)
        self._waiting.enter(sequence)

    def _stop_running_for_heir(self, sequence: Sequence) -> None:
        """Stop ``sequence``, which has ended. If nobody else can give its prompt to a branch of its request that waits,
        the branch takes its place: the prompt is not computed twice."""
        heir = None
        if sequence.has_siblings and not self._memory.may_use_cache(sequence) and self._memory.is_last(sequence):
            heir = self._waiting.branch_of(sequence.request)
        prefix = self._memory.find_prefix(heir) if heir is not None else Prefix([])
        kept = prefix.blocks.copy()
        for block in kept:
            self.pool.share(block)
        self._stop_running(sequence)
        if heir is not None and kept:
            self._enter_batch(heir, prefix)
        self.pool.release_all(kept)

    def _stop_running(self, sequence: Sequence) -> None:
        self._num_uncomputed_prompt_tokens += min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        self._waiting.stop(sequence)
        self._memory.release(sequence)
        self._batch.leave(sequence)

    # ---- what can be seen ----

    @property
    def pool(self) -> BlockPool:
        return self._memory.pool

    @property
    def cache(self) -> PrefixCache:
        return self._memory.cache

    @property
    def running(self) -> Collection[Sequence]:
        """The sequences of the batch, in the order of their admission."""
        return self._batch.sequences

    @property
    def num_running(self) -> int:
        return len(self._batch)

    @property
    def num_running_beams(self) -> int:
        """Running sequences whose next step depends on the tokens of this one."""
        return self._batch.num_beams

    @property
    def num_free_slots(self) -> int:
        """Sequences that the batch has room for."""
        return self._batch.num_free_slots

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_head_room_blocks(self) -> int:
        """Blocks that are kept for the growth of running sequences when another one asks to be admitted."""
        return self._needs.head_room_blocks

    @property
    def num_coming_blocks(self) -> int:
        """Blocks that can be had: now, or when the steps under way are over."""
        return self._needs.coming_blocks

    @property
    def num_queued_requests(self) -> int:
        """Requests of which nothing was admitted yet."""
        return self._waiting.num_queued_requests

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of requests of which nothing was admitted yet."""
        return self._waiting.num_queued_tokens

    def is_queued(self, request: Request) -> bool:
        """Whether nothing of ``request`` was admitted yet."""
        return self._waiting.is_queued(request)

    @property
    def has_work(self) -> bool:
        return bool(self.num_running or self.num_waiting)

    @property
    def num_uncomputed_prompt_tokens(self) -> int:
        """Prefill work accepted and not planned: of running sequences, and of waiting ones what is not expected to be
        cached, or all once they have been in the batch."""
        return max(0, self._num_uncomputed_prompt_tokens - self._waiting.num_expected_cached_tokens)

    def drain_events(self) -> tuple[CacheEvent, ...]:
        """Changes of what the prefix cache holds since the last call."""
        return self.cache.drain_events()

    def check(self) -> None:
        """Prove every invariant. Raises RuntimeError on the first that is broken."""
        running = list(self._batch.sequences)
        waiting = list(self._waiting.everybody(running))
        self._memory.check(running)
        self._waiting.check(running)
        self._batch.check()
        left = sum(max(0, s.num_prompt_tokens - s.num_computed_tokens) for s in running + waiting)
        if left != self._num_uncomputed_prompt_tokens:
            raise RuntimeError(f"{left} prompt tokens are uncomputed, but {self._num_uncomputed_prompt_tokens} counted")


def _is_short_beside(num_tokens: int, long: Sequence) -> bool:
    return num_tokens * _MUCH_SHORTER <= long.num_uncomputed_tokens
