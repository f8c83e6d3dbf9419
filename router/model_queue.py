"""ModelQueue: the queries that wait for one model's groups, and how long one more would wait."""

from __future__ import annotations

from ..worker.messages import RouteQuery
from .drain import Drain
from .fair_share import Level
from .tenants import Account
from .waiting import CanPlace, WaitingOrder
from .waiting_lines import Waiting

_DURATION_MEMORY = 100.0


class ModelQueue:
    """One model's; ``Admission`` keeps it in step with the tenants' accounts."""

    def __init__(self, priority_aging_s: float) -> None:
        self.order = WaitingOrder(priority_aging_s)
        self.drain = Drain()
        """Places that come free, whoever had them."""
        self.expected_drain_per_s = 0.0
        """Until it is measured; 0.0: not known."""
        self._duration_s = 0.0
        """Mean of recent requests, from their beginning to their end; 0.0 until one has ended."""
        self._num_durations = 0.0

    @property
    def num_waiting(self) -> int:
        return self.order.num_waiting

    def take_next(self, can_place: CanPlace, now: float) -> tuple[Waiting, Level] | None:
        """See ``WaitingOrder.take_next``."""
        taken = self.order.take_next(can_place, now)
        if self.order.lacks_places:
            self.drain.wait(now)
        else:
            self.drain.rest(now)
        return taken

    def note_duration(self, duration_s: float) -> None:
        """A request has ended that ran for so long."""
        self._num_durations = min(self._num_durations + 1.0, _DURATION_MEMORY)
        self._duration_s += (duration_s - self._duration_s) / self._num_durations

    def wait_s(self, query: RouteQuery, account: Account, now: float, has_place: bool) -> float:
        """Expected wait of a query that came now, its tenant's limit included; 0.0 where nothing is known."""
        drain_per_s = self.drain.per_s(now, self.expected_drain_per_s)
        wait_s = 0.0
        if not has_place and drain_per_s > 0.0:
            wait_s = self.order.num_ahead(query, account) / drain_per_s
        if account.is_full:
            wait_s = max(wait_s, self._tenant_wait_s(account, now, drain_per_s))
        return wait_s

    def _tenant_wait_s(self, account: Account, now: float, drain_per_s: float) -> float:
        """Until one more of a tenant that is at its limit may run."""
        limit = account.limits.max_running_requests or 1
        expected_per_s = limit / self._duration_s if self._duration_s > 0.0 else drain_per_s
        own_per_s = account.drain.per_s(now, expected_per_s)
        return (account.num_waiting + 1) / own_per_s if own_per_s > 0.0 else 0.0
