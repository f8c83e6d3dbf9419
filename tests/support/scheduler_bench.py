"""A scheduler with what a test turns and reads, and what an engine does between its plans."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.worker.head_room import HeadRoom
from octavo.worker.messages import BlocksStored, Branch, FinishReason, Request, SamplingParams
from octavo.worker.plan_builder import ScheduledStep
from octavo.worker.preemption import Victim
from octavo.worker.routing_hash import RoutingHasher, unpack_hashes
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.sequence import Sequence, SequenceStatus
from octavo.worker.waiting_queue import WaitingQueue

BLOCK_SIZE = 4
HASHER = RoutingHasher(bytes(16), BLOCK_SIZE)
DRAWN = 9
"""Every token that is drawn, unless a test says otherwise."""


class NoHeadRoom(HeadRoom):
    """A pool may be filled to its last block."""

    def tokens(self, num_running: int, num_held_tokens: int, num_tokens_to_come: int) -> int:
        return 0


class SchedulerBench:
    """Blocks of 4 tokens and, unless asked for, no head-room."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        max_num_seqs: int = 8,
        budget: int = 64,
        caching: bool = True,
        plans_ahead: bool = False,
        victim: Victim | None = None,
        head_room: HeadRoom | None = None,
        queue: WaitingQueue | None = None,
    ) -> None:
        limits = SchedulerLimits(num_blocks, BLOCK_SIZE, max_num_seqs, budget, 64, caching, plans_ahead)
        head_room = head_room or NoHeadRoom(BLOCK_SIZE)
        self.scheduler = Scheduler(limits, HASHER, queue=queue, victim=victim, head_room=head_room)
        self.counters = self.scheduler.counters
        self.num_added = 0

    def add(
        self,
        prompt: Iterable[int],
        *,
        output: tuple[int, ...] = (),
        branches: int = 1,
        max_tokens: int = 20,
        beam_width: int | None = None,
        priority: int = 0,
        salt: str | None = None,
        use_prefix_cache: bool = True,
        expected_cached_tokens: int = 0,
    ) -> Sequence:
        """Named by the number of those before it."""
        request = Request(
            str(self.num_added),
            "gateway",
            "model",
            tuple(prompt),
            b"",
            SamplingParams(max_tokens=max_tokens, seed=0, beam_width=beam_width),
            branches=tuple(Branch(index) for index in range(branches)),
            priority=priority,
            cache_salt=salt,
            use_prefix_cache=use_prefix_cache,
            expected_cached_tokens=expected_cached_tokens,
        )
        sequence = Sequence.start(request, list(range(branches)), output, arrival=self.num_added, now=0.0)
        self.num_added += 1
        self.scheduler.add(sequence)
        return sequence

    def run_alone(self, prompt: Iterable[int], **fields: bool | int | str | None) -> Sequence:
        """A sequence whose prompt is computed, in one step that computes nothing else of a prompt."""
        sequence = self.add(prompt, **fields)  # type: ignore[arg-type]
        assert sequence in self.step().sampled
        return sequence

    def plan(self) -> ScheduledStep:
        step = self.scheduler.plan()
        self.scheduler.check()
        assert step is not None
        return step

    def end(self, step: ScheduledStep, token: int = DRAWN) -> None:
        """``step`` is over: its tokens go to those that have not ended meanwhile."""
        self.scheduler.complete(step)
        for sequence in step.sampled:
            if sequence.status is not SequenceStatus.FINISHED:
                sequence.append(token)

    def step(self) -> ScheduledStep:
        """Planned and over."""
        step = self.plan()
        self.end(step)
        return step

    def finish(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.finish(sequence, FinishReason.STOP)
            self.scheduler.check()

    def abort(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence, FinishReason.ABORT)
        self.scheduler.check()

    def stored_hashes(self) -> list[int]:
        """Of the blocks that have become findable since events were last looked at, in order."""
        stored = [event for event in self.scheduler.drain_events() if isinstance(event, BlocksStored)]
        return [value for event in stored for value in unpack_hashes(event.hashes).tolist()]

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.pool.num_free_blocks


def tokens_of(step: ScheduledStep) -> dict[str, int]:
    """Request → its tokens that the step computes."""
    return {sequence.request.request_id: num_tokens for sequence, num_tokens in step.scheduled.items()}
