"""Admission: which queries may go to a group now, which wait for their turn, which are refused.

Plain Python without a clock: ``now`` is in seconds, and the caller's. Not for several threads.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..worker.errors import ConfigurationError
from ..worker.messages import RouteQuery
from .tenants import Account, Accounts, Drain, TenantLimits
from .waiting import DECODE_WEIGHT, CanPlace, KeyedHeap, Level, Turns, Waiting, prefill_cost

MAX_RETRY_AFTER_S = 3600.0
_MAX_ENDED = 16_384
"""Requests whose end is remembered, since another router's word of their beginning may come after it."""
_MAX_NAME_CHARS = 64
_DURATION_MEMORY = 100.0


class RefusalReason(enum.Enum):
    QUEUE_FULL = "queue_full"
    TENANT_LIMIT = "tenant_limit"
    DEADLINE = "deadline"
    """It cannot be, or was not, served in the time that it has."""
    QUEUE_TIMEOUT = "queue_timeout"
    """It has waited for as long as it would."""


@dataclass(frozen=True, slots=True)
class Refusal:
    request_id: str
    reason: RefusalReason
    detail: str
    """For the user, with limit and value."""
    retry_after_s: float
    """About the wait of a like request that came now; at least 1."""


@dataclass(frozen=True, slots=True)
class Wait:
    """It waits; ``take_next`` or ``expire`` will give it back."""

    expected_s: float
    """0.0 where nothing is known."""


@dataclass(frozen=True, slots=True)
class Go:
    """A group may be chosen for it now; it counts as running."""


GO = Go()
Verdict = Go | Wait | Refusal


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Raises ConfigurationError for impossible numbers."""

    max_queued_requests: int = 1024
    """That wait for one model's groups."""
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    """``"*"`` stands for each tenant that is not named."""
    priority_aging_s: float = 60.0
    """Seconds of waiting that make up for one unit of priority, as in the groups' schedulers."""

    def __post_init__(self) -> None:
        if self.max_queued_requests < 0:
            raise ConfigurationError(f"max_queued_requests is {self.max_queued_requests}; it must be at least 0")
        if not 0.0 <= self.priority_aging_s < math.inf:
            raise ConfigurationError(
                f"priority_aging_s is {self.priority_aging_s}; it must be a finite number of seconds, at least 0"
            )


@dataclass(slots=True, eq=False)
class _Queue:
    """One model's."""

    turns: Turns
    drain: Drain = field(default_factory=Drain)
    expected_drain_per_s: float = 0.0
    duration_s: float = 0.0
    """Mean of recent requests, from their turn to their end; 0.0 until one has ended."""
    num_durations: float = 0.0

    def note_duration(self, duration_s: float) -> None:
        self.num_durations = min(self.num_durations + 1.0, _DURATION_MEMORY)
        self.duration_s += (duration_s - self.duration_s) / self.num_durations


@dataclass(slots=True, eq=False)
class _Running:
    queue: _Queue
    account: Account
    level: Level | None
    """Where its output is counted as service; None if it began while nobody waited there."""
    began_s: float | None
    """None for those of other routers."""
    generation: int | None = None


class Admission:
    """Every query that arrives goes at once, waits, or is refused; one that waits is given back exactly once, by
    ``take_next`` or ``expire``, unless it is cancelled. What goes counts as running until it ends.

    Each call takes O(log n), n the requests that wait, amortised; ``take_next`` also asks ``can_place`` once for each
    kind of restriction that waits, up to ``MAX_ASKED``.
    """

    def __init__(self, config: AdmissionConfig) -> None:
        self.num_refused = dict.fromkeys(RefusalReason, 0)
        self._config = config
        self._accounts = Accounts(config.tenants)
        self._queues: dict[str, _Queue] = {}
        self._waiting: dict[str, Waiting] = {}
        self._running: dict[str, _Running] = {}
        self._of_generation: dict[int, dict[str, None]] = {}
        self._deadlines: KeyedHeap[Waiting] = KeyedHeap(_expiry, is_fixed=True)
        self._ended: dict[str, None] = {}
        self._num_arrivals = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def num_waiting_for(self, model: str) -> int:
        queue = self._queues.get(model)
        return queue.turns.num_waiting if queue else 0

    def of_tenant(self, tenant: str | None) -> tuple[int, int]:
        """Its running and waiting requests."""
        account = self._accounts.find(tenant)
        return (account.num_running, account.num_waiting) if account else (0, 0)

    # ---- queries ----

    def arrive(self, query: RouteQuery, now: float, can_place: CanPlace, service_s: float = 0.0) -> Verdict:
        """Judge a query for a model that is known.

        ``can_place`` says whether a group that a query may go to has a free place; see ``take_next``. ``service_s`` is
        the least that the query takes from its turn to its first token. A request that was admitted before, here or,
        as its ``attempt`` or ``excluded_generations`` tell, elsewhere, goes at once: it has had its turn.
        """
        request_id = query.request_id
        if request_id in self._running:
            return GO
        if request_id in self._waiting:
            known = self._waiting[request_id]
            if known.query == query:
                return Wait(known.expected_s)
            self._take_out(known, now)
        queue = self._queues.get(query.model) or self._new_queue(query.model)
        account = self._accounts.open(query.tenant)
        if query.attempt > 1 or query.excluded_generations:
            self._begin(query, queue, account, now, self._served_at_once(query, queue, account))
            return GO
        has_place = can_place(query)
        if has_place and not account.is_full and not (queue.turns.num_waiting and queue.turns.has_turn(can_place)):
            self._begin(query, queue, account, now, self._served_at_once(query, queue, account))
            return GO
        return self._queue_up(query, queue, account, now, has_place, service_s)

    def take_next(self, model: str, can_place: CanPlace, now: float) -> RouteQuery | None:
        """Whose turn it is, no longer waiting but running; None when nobody who waits can go.

        ``can_place`` must not depend on anything of a query but its allowed and excluded groups and generations. Call
        again until None: after each query that has arrived, and whenever a place may have come free.
        """
        queue = self._queues.get(model)
        if queue is None or queue.turns.num_waiting == 0:
            return None
        taken = queue.turns.take_next(can_place, now)
        if queue.turns.lacks_places:
            queue.drain.wait(now)
        else:
            queue.drain.rest(now)
        if taken is None:
            return None
        waiting, level = taken
        self._leave(waiting, queue, now)
        self._begin(waiting.query, queue, waiting.account, now, level)
        return waiting.query

    def expire(self, now: float) -> list[Refusal]:
        """Take out those that have waited for too long."""
        refusals = []
        while (waiting := self._deadlines.first()) is not None and _expiry(waiting) <= now:
            self._take_out(waiting, now)
            refusals.append(self._refuse_expired(waiting, now))
        return refusals

    # ---- what became of those that went ----

    def placed(self, request_id: str, generation: int) -> None:
        """The group that was chosen, again after each attempt."""
        running = self._running.get(request_id)
        if running is not None:
            self._forget_generation(request_id, running)
            running.generation = generation
            self._of_generation.setdefault(generation, {})[request_id] = None

    def adopt(self, request_id: str, model: str, tenant: str | None, generation: int, now: float) -> None:
        """It runs, as another router or a group's report says. Harmless when repeated, or when it has ended here.

        A repeat costs a look-up; one that waits here has found its place elsewhere.
        """
        if request_id in self._ended:
            return
        if request_id not in self._running:
            if request_id in self._waiting:
                self._take_out(self._waiting[request_id], now)
            account = self._accounts.open(tenant)
            account.num_running += 1
            queue = self._queues.get(model) or self._new_queue(model)
            self._running[request_id] = _Running(queue, account, None, None)
        self.placed(request_id, generation)

    def finish(self, request_id: str, now: float, num_output_tokens: int = 0) -> None:
        """It has ended in its group, having computed so many output tokens in all its branches. Harmless when
        repeated, and for a request that is not known."""
        self._note_ended(request_id)
        running = self._end(request_id, now)
        if running is None:
            return
        if running.level is not None and num_output_tokens > 0:
            running.level.charge(running.account, DECODE_WEIGHT * num_output_tokens / running.account.limits.weight)
        if running.began_s is not None:
            running.queue.note_duration(now - running.began_s)

    def cancel(self, request_id: str, now: float) -> bool:
        """Its client or gateway gave it up, or no group took it; whether it was waiting or running."""
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            self._take_out(waiting, now)
            return True
        return self._end(request_id, now) is not None

    def lose(self, generation: int, now: float) -> None:
        """A group is gone, and with it what ran there. What goes on elsewhere will arrive again, or be adopted."""
        for request_id in list(self._of_generation.get(generation, ())):
            self._end(request_id, now, freed=False)

    # ---- estimates ----

    def expect_drain(self, model: str, drain_per_s: float) -> None:
        """Requests that the model's groups would finish in a second if all their places were taken; until that is
        measured. 0.0: not known."""
        queue = self._queues.get(model) or self._new_queue(model)
        queue.expected_drain_per_s = drain_per_s

    def drain_per_s(self, model: str, now: float) -> float:
        """Requests a second, measured while others waited for places; 0.0: not known."""
        queue = self._queues.get(model)
        return queue.drain.per_s(now, queue.expected_drain_per_s) if queue else 0.0

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        found = [waiting for queue in self._queues.values() for waiting in queue.turns.check()]
        _assert({id(each) for each in found} == {id(each) for each in self._waiting.values()}, "who waits")
        _assert(len(found) == len(self._waiting), "somebody waits twice")
        _assert(not self._waiting.keys() & self._running.keys(), "somebody waits and runs")
        due = {id(each) for each in found if each.expires_s is not None}
        _assert({id(each) for each in self._deadlines} == due, "deadlines")
        for account in self._accounts:
            running = sum(each.account is account for each in self._running.values())
            waiting = sum(each.account is account for each in found)
            _assert((running, waiting) == (account.num_running, account.num_waiting), "a tenant's counts")
            _assert(running + waiting > 0, "an idle tenant is remembered")
        placed = {name: number for number, names in self._of_generation.items() for name in names}
        known = {name: each.generation for name, each in self._running.items() if each.generation is not None}
        _assert(placed == known, "which group runs what")

    # ---- inside ----

    def _new_queue(self, model: str) -> _Queue:
        queue = self._queues[model] = _Queue(Turns(self._config.priority_aging_s))
        return queue

    def _served_at_once(self, query: RouteQuery, queue: _Queue, account: Account) -> Level | None:
        """Service counts only beside others that wait at the same priority; in quiet times it costs nothing."""
        turns = queue.turns
        if turns.num_waiting == 0:
            return None
        level = turns.levels.get(turns.level_of(query))
        if level is not None:
            level.take_at_once(account, prefill_cost(query, account))
        return level

    def _begin(self, query: RouteQuery, queue: _Queue, account: Account, now: float, level: Level | None) -> None:
        account.num_running += 1
        self._running[query.request_id] = _Running(queue, account, level, now)
        if self._ended:
            self._ended.pop(query.request_id, None)

    def _end(self, request_id: str, now: float, *, freed: bool = True) -> _Running | None:
        running = self._running.pop(request_id, None)
        if running is None:
            return None
        account, was_full = running.account, running.account.is_full
        self._forget_generation(request_id, running)
        account.num_running -= 1
        if freed:
            running.queue.drain.note_end(now)
            account.drain.note_end(now)
        if was_full and not account.is_full:
            for queue in self._queues.values():
                queue.turns.may_run_again(account)
        self._accounts.close_if_idle(account)
        return running

    def _forget_generation(self, request_id: str, running: _Running) -> None:
        if running.generation is not None:
            names = self._of_generation[running.generation]
            del names[request_id]
            if not names:
                del self._of_generation[running.generation]

    def _note_ended(self, request_id: str) -> None:
        self._ended[request_id] = None
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _queue_up(
        self, query: RouteQuery, queue: _Queue, account: Account, now: float, has_place: bool, service_s: float
    ) -> Wait | Refusal:
        wait_s = self._wait_s(query, queue, account, now, has_place)
        judged = self._judge(query, queue, account, wait_s, service_s)
        if judged is not None:
            self._accounts.close_if_idle(account)
            return self._refuse(query, *judged, wait_s)
        self._num_arrivals += 1
        expires_s = _earliest(query, now, service_s)
        waiting = Waiting(query, account, now, self._num_arrivals, expires_s, wait_s)
        self._waiting[query.request_id] = waiting
        queue.turns.add(waiting)
        account.num_waiting += 1
        if not has_place:
            queue.drain.wait(now)
        if account.is_full:
            account.drain.wait(now)
        if expires_s is not None:
            self._deadlines.put(waiting)
        return Wait(wait_s)

    def _judge(
        self, query: RouteQuery, queue: _Queue, account: Account, wait_s: float, service_s: float
    ) -> tuple[RefusalReason, str] | None:
        if not account.may_queue or (account.is_full and self._config.max_queued_requests == 0):
            return RefusalReason.TENANT_LIMIT, _describe_limits(account)
        limit, num_waiting = self._config.max_queued_requests, queue.turns.num_waiting
        if num_waiting >= limit:
            waiting = "1 request waits" if num_waiting == 1 else f"{num_waiting:,} requests wait"
            return RefusalReason.QUEUE_FULL, f"{waiting} already, --router-max-queued-requests is {limit}"
        if query.queue_timeout_s is not None and wait_s > query.queue_timeout_s:
            return RefusalReason.DEADLINE, _describe_wait("queue_timeout", query.queue_timeout_s, wait_s)
        if query.timeout_s is not None and wait_s + service_s > query.timeout_s:
            return RefusalReason.DEADLINE, _describe_wait("timeout", query.timeout_s, wait_s + service_s)
        return None

    def _refuse(self, query: RouteQuery, reason: RefusalReason, detail: str, wait_s: float) -> Refusal:
        self.num_refused[reason] += 1
        return Refusal(query.request_id, reason, detail, min(max(1.0, wait_s), MAX_RETRY_AFTER_S))

    def _refuse_expired(self, waiting: Waiting, now: float) -> Refusal:
        query, waited_s = waiting.query, now - waiting.arrived_s
        queue = self._queues[query.model]
        wait_s = self._wait_s(query, queue, waiting.account, now, has_place=False)
        if query.queue_timeout_s is not None and waited_s >= query.queue_timeout_s:
            reason, name, limit_s = RefusalReason.QUEUE_TIMEOUT, "queue_timeout", query.queue_timeout_s
        else:
            reason, name, limit_s = RefusalReason.DEADLINE, "timeout", query.timeout_s or 0.0
        return self._refuse(
            query, reason, f"it waited {waited_s:.3g} s for its turn, its {name} is {limit_s:g} s", wait_s
        )

    def _wait_s(self, query: RouteQuery, queue: _Queue, account: Account, now: float, has_place: bool) -> float:
        """Expected wait of a query that came now, its tenant's limit included; 0.0 where nothing is known."""
        drain_per_s = queue.drain.per_s(now, queue.expected_drain_per_s)
        wait_s = 0.0
        if not has_place and drain_per_s > 0.0:
            wait_s = queue.turns.num_ahead(query, account) / drain_per_s
        if account.is_full:
            limit = account.limits.max_running_requests or 1
            expected_per_s = limit / queue.duration_s if queue.duration_s > 0.0 else drain_per_s
            own_per_s = account.drain.per_s(now, expected_per_s)
            wait_s = max(wait_s, (account.num_waiting + 1) / own_per_s) if own_per_s > 0.0 else wait_s
        return wait_s

    def _take_out(self, waiting: Waiting, now: float) -> None:
        """Of the queue, for another reason than its turn."""
        queue = self._queues[waiting.query.model]
        queue.turns.remove(waiting)
        self._leave(waiting, queue, now)
        self._accounts.close_if_idle(waiting.account)

    def _leave(self, waiting: Waiting, queue: _Queue, now: float) -> None:
        account = waiting.account
        del self._waiting[waiting.query.request_id]
        self._deadlines.discard(waiting)
        account.num_waiting -= 1
        if account.num_waiting == 0:
            account.drain.rest(now)
        if queue.turns.num_waiting == 0:
            queue.drain.rest(now)


def _expiry(waiting: Waiting) -> float:
    return math.inf if waiting.expires_s is None else waiting.expires_s


def _earliest(query: RouteQuery, now: float, service_s: float) -> float | None:
    """When a query that came now will have waited for too long."""
    limits_s = []
    if query.queue_timeout_s is not None:
        limits_s.append(query.queue_timeout_s)
    if query.timeout_s is not None:
        limits_s.append(query.timeout_s - service_s)
    return now + min(limits_s) if limits_s else None


def _describe_wait(name: str, limit_s: float, wait_s: float) -> str:
    return f"it would wait about {wait_s:.3g} s, its {name} is {limit_s:g} s"


def _describe_limits(account: Account) -> str:
    name, limits = account.tenant, account.limits
    who = "requests without a tenant are one tenant; it" if name is None else f"tenant '{name[:_MAX_NAME_CHARS]}'"
    running = "" if limits.max_running_requests is None else f"; max_running_requests is {limits.max_running_requests}"
    return (
        f"{who} has {account.num_running:,} requests running and {account.num_waiting:,} waiting, "
        f"max_queued_requests is {limits.max_queued_requests}{running}"
    )


def _assert(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"admission's books do not balance: {what}")
