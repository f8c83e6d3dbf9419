"""How well the router knows what one group holds, and how it keeps that knowledge right.

EXACT: every event up to now has been applied. STALE: something does not fit (a lost event, a block stored behind a
parent that is not known, a prefill that found less than it should), so what is known is used with doubt. BLIND: the
past of the group is unknown. A snapshot makes either EXACT again; meanwhile events still add what they tell.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from ..worker.messages import BlocksCleared, BlocksRemoved, BlocksStored, KVEvents
from .counters import Counters
from .index import PrefixIndex
from .predictions import Predictions
from .rates import Mean

BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared


class KnowledgeState(enum.Enum):
    EXACT = "exact"
    STALE = "stale"
    BLIND = "blind"


_PRIOR_CONFIDENCE = {KnowledgeState.EXACT: 1.0, KnowledgeState.STALE: 0.5, KnowledgeState.BLIND: 0.5}


class GroupKnowledge:
    """The index's part that belongs to one generation of a group, and the position in its stream of events."""

    def __init__(
        self, generation: int, index: PrefixIndex, predictions: Predictions, counters: Counters, snapshot_retry_s: float
    ) -> None:
        self.generation = generation
        self.state = KnowledgeState.BLIND
        self.confidence = _PRIOR_CONFIDENCE[self.state]
        """The share of what is thought to be cached there that lately really was, in the present state."""
        self.slot = index.add_slot()
        self.num_stored = 0
        self.num_removed = 0
        """Blocks stored and removed so far: who compares them later knows whether anything has happened."""
        self._index = index
        self._predictions = predictions
        self._counters = counters
        self._snapshot_retry_s = snapshot_retry_s
        self._asked_at_s: float | None = None
        self._next_sequence: int | None = None
        self._is_empty = True
        self._found = {state: Mean(prior) for state, prior in _PRIOR_CONFIDENCE.items()}

    def apply(self, message: KVEvents) -> None:
        """Take in one message of events. Repeats and stragglers are harmless; a gap makes the group STALE."""
        self._counters.event_messages += 1
        following = 0 if self._next_sequence is None else self._next_sequence
        oldest = following - 1 if message.is_snapshot else following
        if message.generation != self.generation or (
            self._next_sequence is not None and message.sequence_number < oldest
        ):
            self._counters.event_messages_ignored += 1
            return
        self._note_position(message, following)
        if message.is_snapshot:
            self._clear()
        self._apply_all(message.events, is_snapshot=message.is_snapshot)

    def observe(self, confirmed_tokens: int, actual_tokens: int) -> None:
        """A prefill found ``actual_tokens`` in the cache where ``confirmed_tokens`` were known to be."""
        if confirmed_tokens > 0:
            self._found[self.state].add(min(1.0, actual_tokens / confirmed_tokens))
            self._enter(self.state)

    def doubt(self) -> None:
        """Something contradicts what is known; until a snapshot comes it is not exact."""
        if self.state is KnowledgeState.EXACT:
            self._enter(KnowledgeState.STALE)

    def wants_snapshot(self, now: float) -> bool:
        """Whether to ask the leader for a snapshot with the answer that is about to be given."""
        if self.state is KnowledgeState.EXACT:
            return False
        if self._asked_at_s is not None and now - self._asked_at_s < self._snapshot_retry_s:
            return False
        self._asked_at_s = now
        return True

    def dispose(self) -> None:
        """The generation is gone, and with it all that it held."""
        self._predictions.drop_slot(self.slot)
        self._index.remove_slot(self.slot)

    def _enter(self, state: KnowledgeState) -> None:
        self.state = state
        self.confidence = self._found[state].value

    def _note_position(self, message: KVEvents, following: int) -> None:
        if message.is_snapshot:
            self._counters.snapshots += 1
            self._enter(KnowledgeState.EXACT)
        elif self._next_sequence is None and message.sequence_number == 0:
            self._enter(KnowledgeState.EXACT)  # The first message of all: the group held nothing before it.
        elif self._next_sequence is not None and message.sequence_number > following:
            self._counters.event_gaps += 1
            self.doubt()
        self._next_sequence = message.sequence_number + 1

    def _apply_all(self, events: Iterable[BlockEvent], *, is_snapshot: bool) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(event, is_snapshot=is_snapshot)
            elif isinstance(event, BlocksRemoved):
                self.num_removed += len(event.hashes)
                self._counters.blocks_removed += len(event.hashes)
                self._index.removed(self.slot, event.hashes)
            else:
                self._counters.caches_cleared += 1
                self._clear()

    def _store(self, event: BlocksStored, *, is_snapshot: bool) -> None:
        parent = event.parent_hash
        if not is_snapshot and parent is not None and not self._index.may_hold(self.slot, parent):
            self._counters.holes += 1
            self.doubt()
        self.num_stored += len(event.hashes)
        self._counters.blocks_stored += len(event.hashes)
        self._index.stored(self.slot, event.hashes)
        self._is_empty = False

    def _clear(self) -> None:
        self.num_removed += 1
        if self._is_empty:
            return
        old, self.slot = self.slot, self._index.clear_slot(self.slot)
        self._predictions.move_slot(old, self.slot)
        self._is_empty = True
