"""What goes wrong in a simulated cluster: news of caches that gets lost, routers and groups that die."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from ...worker.errors import ConfigurationError
from ...worker.messages import GroupReport, KVEvents


@dataclass(frozen=True, slots=True)
class EventFaults:
    """Shares, from 0 to 1, of the messages of KV events."""

    loss: float = 0.0
    """Never arrive, although the group takes them for delivered."""
    reorder: float = 0.0
    """Arrive after the message that follows."""
    duplicate: float = 0.0
    """Arrive twice."""

    def check(self) -> None:
        """Raise ConfigurationError when a share is impossible."""
        for flag, share in (
            ("--event-loss", self.loss),
            ("--event-reorder", self.reorder),
            ("--event-duplicate", self.duplicate),
        ):
            if not 0.0 <= share <= 1.0:
                raise ConfigurationError(f"{flag}: must be from 0 to 1, got {share}")

    def __bool__(self) -> bool:
        return self.loss > 0.0 or self.reorder > 0.0 or self.duplicate > 0.0


@dataclass(frozen=True, slots=True)
class Faults:
    """Of one simulation. Times are on the virtual clock."""

    events: EventFaults = field(default_factory=EventFaults)
    router_deaths_s: tuple[float, ...] = ()
    """At each of these times another router takes over, which knows nothing."""
    group_deaths: tuple[tuple[float, str], ...] = ()
    """When which group dies. Requests that are there go on elsewhere, as a gateway moves them."""
    group_start_s: float = 5.0
    """From a death until the group is there again, as another generation with an empty cache."""


class EventChannel:
    """Takes the reports of one group to the router, with faults in their events."""

    def __init__(self, faults: EventFaults, rng: random.Random) -> None:
        self._faults = faults
        self._rng = rng
        self._late: KVEvents | None = None
        """Held back until another message has arrived."""

    def carry(self, report: GroupReport) -> GroupReport:
        """The report as it arrives."""
        if not self._faults or not report.events:
            return report
        arriving: list[KVEvents] = []
        for message in report.events:
            arriving += self._arriving(message)
        return replace(report, events=tuple(arriving))

    def _arriving(self, message: KVEvents) -> list[KVEvents]:
        rng, faults = self._rng, self._faults
        if rng.random() < faults.loss:
            return []
        messages = [message, message] if rng.random() < faults.duplicate else [message]
        if self._late is not None:
            messages.append(self._late)
            self._late = None
        elif rng.random() < faults.reorder:
            self._late = messages.pop()
        return messages
