"""What the router counts about itself. Plain numbers; ``metrics.py`` gives them their public names."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """All since the router started."""

    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By (model, reason)."""
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    """By model, of the requests whose prefill was reported; so are the next two."""
    expected_cached_tokens: Counter[str] = field(default_factory=Counter)
    actual_cached_tokens: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    """How a prefill compared with its prediction: ``as_expected``, ``less``, ``more``, ``contradiction``."""
    blocks_stored: int = 0
    blocks_removed: int = 0
    caches_cleared: int = 0
    snapshots: int = 0
    event_messages: int = 0
    event_messages_ignored: int = 0
    """Repeated, late, or of another generation."""
    event_gaps: int = 0
    holes: int = 0
    """Blocks stored behind a parent that the group was not known to hold."""
    reports_fenced: int = 0
    """From a generation that a later one has voided."""
    groups_lost: int = 0
    """Dropped because their reports stopped or a new generation came."""
    reservations_expired: int = 0
