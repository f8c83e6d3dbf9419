"""KeyedHeap: things in the order of keys that change."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class KeyedHeap(Generic[Item]):
    """Items in the order of ``key(item)``, in O(log n) amortised.

    A key that has grown is noticed when its item comes first; after one has fallen its item must be put again. With
    ``is_fixed`` a key never changes.
    """

    __slots__ = ("_entries", "_heap", "_is_fixed", "_key", "_num_puts")

    def __init__(self, key: Callable[[Item], Any], *, is_fixed: bool = False) -> None:
        self._key = key
        self._is_fixed = is_fixed
        self._heap: list[tuple[Any, int, Item]] = []
        self._entries: dict[Item, tuple[Any, int, Item]] = {}
        """The entries that are good; the heap also has outdated ones, never more than good ones."""
        self._num_puts = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[Item]:
        """In no particular order."""
        return iter(self._entries)

    def put(self, item: Item) -> None:
        key = self._key(item)
        present = self._entries.get(item)
        if present is not None and present[0] == key:
            return
        self._num_puts += 1  # unique, so that items are never compared
        entry = self._entries[item] = (key, self._num_puts, item)
        heapq.heappush(self._heap, entry)
        self._compact()

    def discard(self, item: Item) -> None:
        if self._entries.pop(item, None) is not None:
            self._compact()

    def first(self) -> Item | None:
        while self._heap:
            entry = self._heap[0]
            item = entry[2]
            if self._entries.get(item) is not entry:
                heapq.heappop(self._heap)
            elif self._is_fixed or entry[0] == (key := self._key(item)):
                return item
            else:
                entry = self._entries[item] = (key, entry[1], item)
                heapq.heapreplace(self._heap, entry)
        return None

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._entries):
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
