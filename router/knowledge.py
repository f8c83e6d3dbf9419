"""How well the router knows what one group holds, and how it keeps that knowledge right.

EXACT: every event up to now has been applied. STALE: something does not fit (a lost event, a block stored behind a
parent that is not known, a prefill that found less than it should), so what is known is used with doubt. BLIND: the
past of the group is unknown. A snapshot makes either EXACT again; meanwhile events still add what they tell.
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING

from ..worker.messages import BlocksCleared, BlocksRemoved, BlocksStored, KVEvents
from ..worker.routing_hash import MASK, unpack_hashes, whole_hashes
from .counters import Counters
from .rates import Mean

if TYPE_CHECKING:  # Compiled code, which not everybody who knows of groups needs.
    from .index import PrefixIndex
    from .predictions import Predictions

logger = logging.getLogger(__name__)


class KnowledgeState(enum.Enum):
    EXACT = "exact"
    STALE = "stale"
    BLIND = "blind"


STATES = tuple(KnowledgeState)
"""By the numbers that stand for them in tables."""

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
        self._filling: tuple[int, int] | None = None
        """The snapshot that is coming in: its number, and that of its parts."""
        self._next_part = 0
        self._is_filling = False
        """A part of a snapshot has come, and more are on their way."""
        self._is_empty = True
        self._found = {state: Mean(prior) for state, prior in _PRIOR_CONFIDENCE.items()}

    def apply(self, message: KVEvents) -> None:
        """Take in one message of events. Repeats and stragglers are harmless; a gap makes the group STALE, and so does
        a message that is none, which is left out as a whole."""
        self._counters.event_messages += 1
        if (error := _what_is_wrong(message)) is not None:
            self._counters.event_messages_malformed += 1
            logger.warning("events %r of generation %r: %s", message.sequence_number, message.generation, error)
            self.doubt()
            return
        following = 0 if self._next_sequence is None else self._next_sequence
        oldest = following - 1 if message.is_snapshot else following
        if message.generation != self.generation or (
            self._next_sequence is not None and message.sequence_number < oldest
        ):
            self._counters.event_messages_ignored += 1
            return
        self._note_position(message, following)
        if message.is_snapshot and message.part == 0:
            self._clear()
        self._apply_all(message)

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
        if self._is_filling:
            self._is_filling, self._asked_at_s = False, now
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
            self._note_part(message, following)
        elif self._next_sequence is None and message.sequence_number == 0:
            self._enter(KnowledgeState.EXACT)  # The first message of all: the group held nothing before it.
        elif self._next_sequence is not None and message.sequence_number > following:
            self._counters.event_gaps += 1
            self.doubt()
        self._next_sequence = message.sequence_number + 1

    def _note_part(self, message: KVEvents, following: int) -> None:
        """The last part of a snapshot makes it exact; until then little is known."""
        snapshot = (message.sequence_number, message.num_parts)
        if message.part == 0:
            self._filling, self._next_part = snapshot, 0
            self._enter(KnowledgeState.BLIND)
        if (snapshot, message.part) == (self._filling, self._next_part):
            self._next_part += 1
            self._is_filling = self._next_part < message.num_parts
            if not self._is_filling:
                self._filling = None
                self._counters.snapshots += 1
                self._enter(KnowledgeState.EXACT)
        elif message.sequence_number >= following:
            self.doubt()  # What came before this part is lost.

    def _apply_all(self, message: KVEvents) -> None:
        if message.is_snapshot:
            self._store_all(message)
            return
        for event in message.events:
            if isinstance(event, BlocksStored):
                self._store(event)
            elif isinstance(event, BlocksRemoved):
                hashes = unpack_hashes(event.hashes)
                self.num_removed += len(hashes)
                self._counters.blocks_removed += len(hashes)
                self._index.removed(self.slot, hashes)
            else:
                self._counters.caches_cleared += 1
                self._clear()

    def _store_all(self, message: KVEvents) -> None:
        """Of a snapshot, at once: its chains may be many and short."""
        self._note_stored(b"".join([event.hashes for event in message.events if isinstance(event, BlocksStored)]))

    def _store(self, event: BlocksStored) -> None:
        parent = event.parent_hash
        if parent is not None and not self._index.may_hold(self.slot, parent):
            self._counters.holes += 1
            self.doubt()
        self._note_stored(event.hashes)

    def _note_stored(self, packed: bytes) -> None:
        hashes = unpack_hashes(packed)
        self.num_stored += len(hashes)
        self._counters.blocks_stored += len(hashes)
        self._index.stored(self.slot, hashes)
        self._is_empty = False

    def _clear(self) -> None:
        self.num_removed += 1
        if self._is_empty:
            return
        old, self.slot = self.slot, self._index.clear_slot(self.slot)
        self._predictions.move_slot(old, self.slot)
        self._is_empty = True


def _what_is_wrong(message: KVEvents) -> str | None:
    """Why it cannot be a message of events; None: it can."""
    numbers = (message.generation, message.sequence_number, message.part, message.num_parts)
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        return f"generation, sequence number, part and parts are {numbers}, which are no counts"
    if message.part >= message.num_parts:
        return f"part {message.part} of {message.num_parts}"
    for event in message.events:
        parent = event.parent_hash if isinstance(event, BlocksStored) else None
        if parent is not None and not (isinstance(parent, int) and 0 <= parent <= MASK):
            return f"the parent {parent!r} is no routing hash"
        if not isinstance(event, BlocksCleared):
            try:
                whole_hashes(event.hashes)
            except ValueError as error:
                return str(error)
    return None
