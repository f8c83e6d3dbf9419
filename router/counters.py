"""What the router counts about itself. Plain numbers; ``metrics.py`` gives them their public names."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from ..worker.histogram import Histogram


@dataclass(slots=True)
class Counters:
    """All since the router started."""

    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By (model, reason)."""
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    """By model, of the requests whose prefill was reported; so are the next two."""
    expected_cached_tokens: Counter[str] = field(default_factory=Counter)
    actual_cached_tokens: Counter[str] = field(default_factory=Counter)
    expected_ttft_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By model, of the requests whose first token was reported; so is the next one."""
    actual_ttft_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ttft_error: Histogram = field(default_factory=Histogram)
    """How far the two were apart, in seconds."""
    queue_time: Histogram = field(default_factory=Histogram)
    """Seconds that requests waited in the router which then went to a group."""
    event_lag: Histogram = field(default_factory=Histogram)
    """Seconds for which the oldest news of a report had waited."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """How a prefill compared with its prediction: ``as_expected``, ``less``, ``more``, ``contradiction``."""
    blocks_stored: int = 0
    blocks_removed: int = 0
    caches_cleared: int = 0
    snapshots: int = 0
    event_messages: int = 0
    event_messages_ignored: int = 0
    """Repeated, late, or of another generation."""
    event_messages_malformed: int = 0
    event_gaps: int = 0
    holes: int = 0
    """Blocks stored behind a parent that the group was not known to hold."""
    failures: Counter[str] = field(default_factory=Counter)
    """Unexpected errors, by what was being done."""
    reports_malformed: int = 0
    """With numbers that no group has; ignored."""
    reports_fenced: int = 0
    """From a generation that a later one has voided."""
    groups_lost: int = 0
    """Dropped because their reports stopped or a new generation came."""
    reservations_expired: int = 0
    """Their requests were not received, or not computed, in time."""
