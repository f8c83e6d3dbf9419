"""WaitingQueue: the sequences that are not in the batch, in a policy's order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .policies import Order
from .sequence import Sequence, SequenceStatus


class WaitingQueue:
    """A heap. A sequence that ends while it waits stays in it for a while and is passed over."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._heap: list[tuple[tuple[float, ...], int, Sequence]] = []
        self._num_ended = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_ended

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return (sequence for _, _, sequence in self._heap if sequence.status is SequenceStatus.WAITING)

    def add(self, sequence: Sequence) -> None:
        """``sequence`` has the status WAITING."""
        heapq.heappush(self._heap, (self._order.key(sequence), sequence.arrival, sequence))

    def first(self) -> Sequence | None:
        """The next in order; it stays in the queue."""
        while self._heap and self._heap[0][2].status is not SequenceStatus.WAITING:
            heapq.heappop(self._heap)
            self._num_ended -= 1
        return self._heap[0][2] if self._heap else None

    def remove_first(self) -> None:
        """Take out what ``first`` gave."""
        heapq.heappop(self._heap)

    def note_end(self) -> None:
        """One of its sequences has ended, and has another status now."""
        self._num_ended += 1
        if 2 * self._num_ended > len(self._heap):  # so that what has ended takes no more memory than what waits
            self._heap = [entry for entry in self._heap if entry[2].status is SequenceStatus.WAITING]
            heapq.heapify(self._heap)
            self._num_ended = 0
