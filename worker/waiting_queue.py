"""WaitingQueue: the sequences that are not in the batch, in a policy's order. Here: those that a heap can keep."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

from .sequence import Sequence

Key = tuple[float, ...]


class WaitingQueue(Protocol):
    """What the scheduler asks of a policy. Of equals the one with the smaller (arrival, branch) comes first."""

    @property
    def counts_service(self) -> bool:
        """Whether ``note_served`` does anything; a scheduler may leave it out where it does not."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Let ``sequence`` wait, for the first time or again; its place in the order is judged now."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Take out any that waits. Raises KeyError when it does not.

        Its status tells why: still WAITING, to be served; FINISHED, because it has ended.
        """
        ...

    def first(self) -> Sequence | None:
        """The next in order; it stays in the queue."""
        ...

    def in_order(self, limit: int) -> list[Sequence]:
        """The first ``limit`` or fewer, as ``first`` and ``remove`` in turn would give them; they stay in the queue."""
        ...

    def precedes(self, first: Sequence, second: Sequence) -> bool:
        """Whether ``first`` would be served before ``second`` if both waited now."""
        ...

    def note_served(self, sequence: Sequence, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """A step was planned that computes so many tokens of ``sequence``."""
        ...


class Order(Protocol):
    def key(self, sequence: Sequence) -> Key:
        """Waiting sequences are admitted in ascending order of this key, which must not change while one waits."""
        ...


def expected_prefill_tokens(sequence: Sequence) -> int:
    """Tokens of a waiting sequence that are likely to be computed before its next token can be drawn; at least 1.

    What was expected to be cached is forgotten once the sequence has been in the batch: its next turn comes in another
    state of the cache.
    """
    return max(sequence.num_uncomputed_tokens - sequence.num_expected_cached_tokens, 1)


Item = TypeVar("Item", bound=Hashable)


class KeyedHeap(Generic[Item]):
    """Items in ascending order of a key that each was put in with; an item can be put again with another key.

    An entry that is no longer good stays in the heap and is passed over. There are never more of those than of good
    ones, so ``put`` and ``discard`` take O(log n), amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Item]] = []
        self._entries: dict[Item, tuple[Key, int, Item]] = {}
        """Those that are good."""
        self._num_puts = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Item]:
        """In no particular order."""
        return iter(self._entries)

    def key(self, item: Item) -> Key:
        return self._entries[item][0]

    def put(self, item: Item, key: Key) -> None:
        entry = self._entries[item] = (key, self._num_puts, item)
        self._num_puts += 1  # unique, so that items are never compared
        heapq.heappush(self._heap, entry)
        self._compact()

    def discard(self, item: Item) -> None:
        """Raises KeyError when ``item`` is not in it."""
        del self._entries[item]
        self._compact()

    def first(self) -> Item | None:
        heap, entries = self._heap, self._entries
        while heap and entries.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def ordered(self) -> Iterator[Item]:
        """All, first one first: O(log k) for the k-th. Nothing may be put or discarded meanwhile."""
        heap = self._heap
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            entry, index = heapq.heappop(frontier)
            if self._entries.get(entry[2]) is entry:
                yield entry[2]
            for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                heapq.heappush(frontier, (heap[child], child))

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._entries):
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)


class HeapQueue:
    """A WaitingQueue whose order depends on nothing but the sequences that wait."""

    counts_service = False

    def __init__(self, order: Order) -> None:
        self._order = order
        self._heap: KeyedHeap[Sequence] = KeyedHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._heap)

    def key(self, sequence: Sequence) -> Key:
        """That ``sequence`` waits with."""
        return self._heap.key(sequence)

    def add(self, sequence: Sequence) -> None:
        self._heap.put(sequence, self._key_now(sequence))

    def precedes(self, first: Sequence, second: Sequence) -> bool:
        return self._key_now(first) < self._key_now(second)

    def _key_now(self, sequence: Sequence) -> Key:
        return (*self._order.key(sequence), sequence.arrival, sequence.branch)

    def remove(self, sequence: Sequence) -> None:
        self._heap.discard(sequence)

    def first(self) -> Sequence | None:
        return self._heap.first()

    def ordered(self) -> Iterator[Sequence]:
        """All in order; nothing may be added or removed meanwhile."""
        return self._heap.ordered()

    def in_order(self, limit: int) -> list[Sequence]:
        return list(islice(self._heap.ordered(), limit))

    def note_served(self, sequence: Sequence, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """Nothing depends on it."""
