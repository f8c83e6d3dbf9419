"""What one router has been told of a worker group's news, and what it is to be told next.

All routers read one log of cache events, each from its own place in it, and each has its own requests to hear of. What
is said to one of them waits for its answer alone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .messages import BlocksCleared, BlocksStored, GroupReport, KVEvents, RequestProgress
from .prefix_cache import CacheEvent
from .routing_hash import HASH_BYTES

_MOST_EVENT_MESSAGES = 4_096
"""Kept for a router that does not answer. One that has missed some of them gets a snapshot when it is back."""

_MOST_PROGRESS = 16_384
"""Requests kept for a router that does not answer. Beyond it the oldest are dropped: the router has given them up."""

MOST_BLOCKS = 16_384
"""Blocks that a report speaks of: a router has a few groups' reports and all its queries on one event loop."""

BLOCKS_PER_EVENT = 8
"""An event costs the router about as much as so many blocks more."""


class _Entry(NamedTuple):
    noted_at_s: float
    num_blocks: int
    message: KVEvents


class EventLog:
    """The latest messages of cache events, numbered from 0 without gaps."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.next_number = 0
        self._entries: deque[_Entry] = deque()

    @property
    def first_number(self) -> int:
        """Of the oldest message that is still there."""
        return self.next_number - len(self._entries)

    def add(self, events: tuple[CacheEvent, ...], now: float) -> None:
        message = KVEvents(self.generation, self.next_number, events)
        self._entries.append(_Entry(now, num_blocks(events), message))
        self.next_number += 1
        self.forget(self.next_number - _MOST_EVENT_MESSAGES)

    def forget(self, number: int) -> None:
        """The messages before ``number`` are not needed any more."""
        while self.first_number < min(number, self.next_number):
            self._entries.popleft()

    def since(self, number: int) -> Iterator[_Entry]:
        """From ``number`` on; none if that one is not there any more."""
        start = number - self.first_number
        return itertools.islice(self._entries, start, None) if start >= 0 else iter(())


class ReportReader:
    """One router's. It begins with all there ever was, which is a snapshot when the log has forgotten some of it."""

    def __init__(self, log: EventLog) -> None:
        self.metrics = ""
        """To be told; empty when they are known."""
        self._log = log
        self._position = 0
        """Number of the next message to be told."""
        self._snapshot: deque[_Entry] = deque()
        """Parts to be told before it."""
        self._progress: dict[str, tuple[float, RequestProgress]] = {}
        """Oldest first."""

    @property
    def is_behind(self) -> bool:
        """It has missed something: only a snapshot helps."""
        return self._position < self._log.first_number

    @property
    def position(self) -> int:
        """Messages of the log before this one are not needed here."""
        return self._position

    @property
    def has_news(self) -> bool:
        """Something besides the passing of time."""
        return bool(self._progress or self._snapshot) or self._position < self._log.next_number

    @property
    def has_urgent_news(self) -> bool:
        """Something that decisions wait for: requests that came, were prefilled or ended, or the snapshot wanted."""
        return bool(self._progress or self._snapshot)

    def note(self, entries: Iterable[RequestProgress], now: float) -> None:
        for entry in entries:
            self._progress.pop(entry.request_id, None)
            self._progress[entry.request_id] = (now, entry)
        while len(self._progress) > _MOST_PROGRESS:
            del self._progress[next(iter(self._progress))]

    def start_over(
        self, parts: Sequence[tuple[BlocksStored, ...]], live: Iterable[RequestProgress], now: float
    ) -> None:
        """What the group holds and does replaces all that was to be told; what has ended stays."""
        number = self._log.next_number - 1
        self._snapshot = deque(
            _Entry(now, num_blocks(events), KVEvents(self._log.generation, number, events, True, part, len(parts)))
            for part, events in enumerate(parts)
        )
        self._position = self._log.next_number
        self.note([entry for entry in live if entry.request_id not in self._progress], now)

    def progress(self) -> tuple[RequestProgress, ...]:
        return tuple(entry for _, entry in self._progress.values())

    def events(self) -> tuple[KVEvents, ...]:
        """As many as one report may carry, and one in any case."""
        taken: list[KVEvents] = []
        total = 0
        for entry in self._waiting():
            total += entry.num_blocks
            if taken and total > MOST_BLOCKS:
                break
            taken.append(entry.message)
        return tuple(taken)

    def oldest_news_age_s(self, now: float) -> float:
        events, progress = next(self._waiting(), None), next(iter(self._progress.values()), None)
        return max(0.0, now - min(events.noted_at_s if events else now, progress[0] if progress else now))

    def acknowledged(self, report: GroupReport) -> None:
        """The router has ``report``: forget what it held."""
        for entry in report.progress:
            if self._progress.get(entry.request_id, (0.0, None))[1] == entry:
                del self._progress[entry.request_id]
        for message in report.events:
            if not message.is_snapshot:
                self._position = max(self._position, message.sequence_number + 1)
            elif self._snapshot and self._snapshot[0].message is message:
                self._snapshot.popleft()
        if self.metrics == report.metrics:
            self.metrics = ""

    def _waiting(self) -> Iterator[_Entry]:
        return itertools.chain(self._snapshot, self._log.since(self._position))


def num_blocks(events: Iterable[CacheEvent]) -> int:
    """What the events cost their reader, in blocks."""
    hashes = [b"" if isinstance(event, BlocksCleared) else event.hashes for event in events]
    return len(hashes) * BLOCKS_PER_EVENT + sum(map(len, hashes)) // HASH_BYTES
