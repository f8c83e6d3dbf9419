"""What the router counts about itself. Plain numbers; ``metrics.py`` gives them their public names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """Counts of values by upper bounds, as Prometheus has them."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self.sum += value
        self._counts[bisect_left(self._bounds, value)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many values were not above it), the last for all."""
        total, buckets = 0.0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets


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
