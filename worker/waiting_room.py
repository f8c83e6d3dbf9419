"""WaitingRoom: the sequences that are not in the batch.

Most are in the policy's queue. Some follow a running sequence that is computing their prefix (``prefix_wait.py``), and
come back to the queue when it has. Requests of which nothing was admitted yet are counted: they are what bounds bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .kv_memory import Prefix
from .messages import Request
from .plan_builder import ScheduledStep
from .prefix_wait import PrefixWait
from .sequence import Sequence, SequenceStatus
from .waiting_queue import WaitingQueue


class WaitingRoom:
    """``queue`` says who comes first."""

    def __init__(self, queue: WaitingQueue, block_size: int) -> None:
        self._queue = queue
        self._prefix_wait = PrefixWait(block_size)
        self._beams: dict[int, Sequence] = {}
        """Of the queue, by id."""
        self._queued: dict[str, list[Sequence]] = {}
        """Sequences of requests of which nothing was admitted yet."""
        self.num_queued_tokens = 0
        """Prompt tokens of those requests."""
        self.num_expected_cached_tokens = 0
        """Those of them that are expected to be cached."""

    def __len__(self) -> int:
        return len(self._queue) + len(self._prefix_wait)

    # ---- who comes and goes ----

    def enter_new(self, sequence: Sequence) -> None:
        """A sequence of a request that has just come."""
        request = sequence.request
        if request.request_id not in self._queued:
            self._queued[request.request_id] = []
            self.num_queued_tokens += len(request.prompt_token_ids)
            self.num_expected_cached_tokens += _num_expected_cached_tokens(request)
        self._queued[request.request_id].append(sequence)
        self.enter(sequence)

    def enter(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        self._queue.add(sequence)
        if sequence.is_beam:
            self._beams[id(sequence)] = sequence

    def admit(self, sequence: Sequence) -> None:
        """Its request no longer counts as queued."""
        self._queue.remove(sequence)
        self._beams.pop(id(sequence), None)
        self._note_not_queued(sequence.request)

    def end(self, sequence: Sequence) -> None:
        """It has ended while it waited."""
        self._beams.pop(id(sequence), None)
        if sequence.follows is not None:
            self._prefix_wait.leave(sequence)
        else:
            self._queue.remove(sequence)
        queued = self._queued.get(sequence.request.request_id, [])
        if sequence in queued:
            queued.remove(sequence)
            if not queued:
                self._note_not_queued(sequence.request)

    def _note_not_queued(self, request: Request) -> None:
        if self._queued.pop(request.request_id, None) is not None:
            self.num_queued_tokens -= len(request.prompt_token_ids)
            self.num_expected_cached_tokens -= _num_expected_cached_tokens(request)

    # ---- who is next ----

    def first(self) -> Sequence | None:
        """The next in the policy's order, of those that follow nobody."""
        return self._queue.first()

    @property
    def beams(self) -> Iterable[Sequence]:
        """Beams of searches that wait, and follow nobody."""
        return [beam for beam in self._beams.values() if beam.follows is None] if self._beams else ()

    def branch_of(self, request: Request) -> Sequence | None:
        """Any sequence of ``request`` that waits. Looks at all."""
        return next((sequence for sequence in self._queue if sequence.request is request), None)

    def in_order(self, limit: int) -> list[Sequence]:
        return self._queue.in_order(limit)

    def precedes(self, first: Sequence, second: Sequence) -> bool:
        """Whether ``first`` would be served before ``second`` if both waited now."""
        return self._queue.precedes(first, second)

    def count_service(self, step: ScheduledStep) -> None:
        """Policies that are fair by service are told what a step gives to whom."""
        if not self._queue.counts_service:
            return
        decoded = set(step.sampled)
        for sequence, num_tokens in step.scheduled.items():
            num_decoded = int(sequence in decoded)
            end = sequence.num_computed_tokens - num_decoded
            # What is computed again after a preemption was served already.
            num_prefilled = min(max(0, end - sequence.most_served_tokens), num_tokens - num_decoded)
            sequence.most_served_tokens = max(sequence.most_served_tokens, end)
            self._queue.note_served(sequence, num_prefilled, num_decoded)
        for sequence in step.forks:
            self._queue.note_served(sequence, 0, 1)

    # ---- prefixes that are being computed ----

    def leader_of(self, sequence: Sequence, prefix: Prefix) -> Sequence | None:
        """The running sequence that is about to compute what follows ``prefix`` in a waiting one, if any."""
        return self._prefix_wait.leader_of(sequence, prefix.tail, len(prefix.blocks))

    def follow(self, sequence: Sequence, leader: Sequence) -> None:
        """Let ``sequence`` leave the queue until ``leader`` has computed what they have in common."""
        self._queue.remove(sequence)
        self._prefix_wait.join(sequence, leader)

    def advance(self, leader: Sequence) -> None:
        """``leader`` was admitted, or has stored blocks."""
        self._prefix_wait.advance(leader, self._queue)

    def stop(self, leader: Sequence) -> None:
        """``leader`` computes nothing more that others could find."""
        self._prefix_wait.stop(leader, self._queue)

    # ---- what can be seen ----

    @property
    def num_queued_requests(self) -> int:
        """Requests of which nothing was admitted yet."""
        return len(self._queued)

    def is_queued(self, request: Request) -> bool:
        """Whether nothing of ``request`` was admitted yet."""
        return request.request_id in self._queued

    def everybody(self, running: list[Sequence]) -> Iterator[Sequence]:
        """All who wait; those that follow somebody are known by their leaders, which are in ``running``."""
        yield from self._queue
        yield from (sequence for leader in running for _, sequence in leader.followers)

    def check(self, running: list[Sequence]) -> None:
        """Prove that everybody waits once, holds nothing, and is counted. Raises RuntimeError."""
        waiting = list(self.everybody(running))
        self._prefix_wait.check(running, waiting)
        if len(waiting) != len(self):
            raise RuntimeError(f"{len(waiting)} sequences wait, but {len(self)} are counted")
        if any(sequence.status is not SequenceStatus.WAITING for sequence in waiting):
            raise RuntimeError("a sequence is queued that does not wait")
        if any(s.block_table or s.num_computed_tokens or s.slot is not None for s in waiting):
            raise RuntimeError("a waiting sequence holds blocks or a slot")
        if any(sequence not in waiting for queued in self._queued.values() for sequence in queued):
            raise RuntimeError("a sequence is counted as queued that does not wait")
        if sum(queued[0].num_prompt_tokens for queued in self._queued.values()) != self.num_queued_tokens:
            raise RuntimeError("the queued prompt tokens are miscounted")


def _num_expected_cached_tokens(request: Request) -> int:
    return min(request.expected_cached_tokens, len(request.prompt_token_ids))
