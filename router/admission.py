"""Admission: which queries may go to a group now, which wait for their turn, which are refused.

Plain Python without a clock: ``now`` is in seconds, and the caller's. Not for several threads.
"""

from __future__ import annotations

import math
from collections.abc import KeysView, Mapping
from dataclasses import dataclass, field

from ..worker.errors import ConfigurationError
from ..worker.messages import RouteQuery
from .fair_share import DECODE_WEIGHT, Level
from .keyed_heap import KeyedHeap
from .model_queue import ModelQueue
from .running import Running, RunningRequest
from .tenants import Account, Accounts, TenantLimits
from .verdicts import GO, Refusal, RefusalReason, Verdict, Wait, describe_limits, describe_queue, describe_wait
from .waiting import CanPlace
from .waiting_lines import Waiting


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


class Admission:
    """Every query that arrives goes at once, waits, or is refused; one that waits is given back exactly once, by
    ``take_next`` or ``expire``, unless it is cancelled. What goes counts as running until it ends.

    Each call takes O(log n), n the requests that wait, amortised; ``take_next`` also asks ``can_place`` once for each
    kind of restriction that waits, up to ``MAX_ASKED``.
    """

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._accounts = Accounts(config.tenants)
        self._queues: dict[str, ModelQueue] = {}
        self._waiting: dict[str, Waiting] = {}
        self._running = Running()
        self._deadlines: KeyedHeap[Waiting] = KeyedHeap(_expiry, is_fixed=True)
        self._num_arrivals = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def waiting_ids(self) -> KeysView[str]:
        """Requests that wait."""
        return self._waiting.keys()

    def knows(self, request_id: str) -> bool:
        """Whether it waits or runs."""
        return request_id in self._waiting or request_id in self._running

    def has_ended(self, request_id: str) -> bool:
        """Whether it is known to have ended, lately."""
        return self._running.has_ended(request_id)

    def num_waiting_for(self, model: str) -> int:
        queue = self._queues.get(model)
        return queue.num_waiting if queue else 0

    def of_tenant(self, tenant: str | None) -> tuple[int, int]:
        """Its running and waiting requests."""
        account = self._accounts.find(tenant)
        return (account.num_running, account.num_waiting) if account else (0, 0)

    # ---- queries ----

    def arrive(self, query: RouteQuery, now: float, can_place: CanPlace) -> Verdict:
        """Judge a query for a model that is known.

        ``can_place`` says whether a group that a query may go to has a free place; see ``take_next``. A request that
        was admitted before, here or, as its ``attempt`` or ``excluded_generations`` tell, elsewhere, goes at once: it
        has had its turn.
        """
        if query.request_id in self._running:
            return GO
        if (known := self._waiting.get(query.request_id)) is not None:
            if known.query == query:
                return Wait(known.expected_s)
            self._take_out(known, now)
        queue, account = self._queue_of(query.model), self._accounts.open(query.tenant)
        if not (query.attempt > 1 or query.excluded_generations):
            has_place = can_place(query)
            if not has_place or account.is_full or _would_pass_others(queue, can_place):
                return self._queue_up(query, queue, account, now, has_place)
        self._begin(query, queue, account, now, queue.order.serve_at_once(query, account))
        return GO

    def take_next(self, model: str, can_place: CanPlace, now: float) -> RouteQuery | None:
        """Whose turn it is, no longer waiting but running; None when nobody who waits can go.

        ``can_place`` must not depend on anything of a query but its allowed and excluded groups and generations. Call
        again until None: after each query that has arrived, and whenever a place may have come free.
        """
        queue = self._queues.get(model)
        if queue is None or queue.num_waiting == 0:
            return None
        if (taken := queue.take_next(can_place, now)) is None:
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
        self._running.place(request_id, generation)

    def adopt(self, request_id: str, model: str, tenant: str | None, generation: int, now: float) -> None:
        """It runs, as another router or a group's report says. Harmless when repeated, or when it has ended here.

        A repeat costs a look-up; one that waits here has found its place elsewhere.
        """
        if self._running.has_ended(request_id):
            return
        if request_id not in self._running:
            if request_id in self._waiting:
                self._take_out(self._waiting[request_id], now)
            account = self._accounts.open(tenant)
            account.num_running += 1
            self._running.begin(request_id, RunningRequest(self._queue_of(model), account, None, None))
        self._running.place(request_id, generation)

    def finish(self, request_id: str, now: float, num_output_tokens: int = 0) -> None:
        """It has ended in its group, having computed so many output tokens in all its branches. Harmless when
        repeated, and for a request that is not known."""
        self._running.note_ended(request_id)
        ended = self._end(request_id, now)
        if ended is None:
            return
        if ended.level is not None and num_output_tokens > 0:
            ended.level.charge(ended.account, DECODE_WEIGHT * num_output_tokens / ended.account.limits.weight)
        if ended.began_s is not None:
            ended.queue.note_duration(now - ended.began_s)

    def cancel(self, request_id: str, now: float) -> bool:
        """Its client or gateway gave it up, or no group took it; whether it was waiting or running."""
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            self._take_out(waiting, now)
            return True
        return self._end(request_id, now) is not None

    def lose(self, generation: int, now: float) -> None:
        """A group is gone, and with it what ran there. What goes on elsewhere will arrive again, or be adopted."""
        for request_id in self._running.of_generation(generation):
            self._end(request_id, now, freed=False)

    # ---- estimates ----

    def expect_drain(self, model: str, drain_per_s: float) -> None:
        """Requests that the model's groups would finish in a second if all their places were taken; until that is
        measured. 0.0: not known."""
        self._queue_of(model).expected_drain_per_s = drain_per_s

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        found = [waiting for queue in self._queues.values() for waiting in queue.order.check()]
        _assert({id(each) for each in found} == {id(each) for each in self._waiting.values()}, "who waits")
        _assert(len(found) == len(self._waiting), "somebody waits twice")
        _assert(self._waiting.keys().isdisjoint(self._running), "somebody waits and runs")
        due = {id(each) for each in found if each.expires_s is not None}
        _assert({id(each) for each in self._deadlines} == due, "deadlines")
        for account in self._accounts:
            running = self._running.of_account(account)
            waiting = sum(each.account is account for each in found)
            _assert((running, waiting) == (account.num_running, account.num_waiting), "a tenant's counts")
            _assert(running + waiting > 0, "an idle tenant is remembered")
        self._running.check()

    # ---- inside ----

    def _queue_of(self, model: str) -> ModelQueue:
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = ModelQueue(self._config.priority_aging_s)
        return queue

    def _begin(self, query: RouteQuery, queue: ModelQueue, account: Account, now: float, level: Level | None) -> None:
        account.num_running += 1
        self._running.begin(query.request_id, RunningRequest(queue, account, level, now))

    def _end(self, request_id: str, now: float, *, freed: bool = True) -> RunningRequest | None:
        """``freed``: its place can be had by another one."""
        if (ended := self._running.remove(request_id)) is None:
            return None
        account, was_full = ended.account, ended.account.is_full
        account.num_running -= 1
        if freed:
            ended.queue.drain.note_end(now)
            account.drain.note_end(now)
        if was_full and not account.is_full:
            for queue in self._queues.values():
                queue.order.may_run_again(account)
        self._accounts.close_if_idle(account)
        return ended

    def _queue_up(
        self, query: RouteQuery, queue: ModelQueue, account: Account, now: float, has_place: bool
    ) -> Wait | Refusal:
        wait_s = queue.wait_s(query, account, now, has_place)
        if (refused := self._why_refused(query, queue, account, wait_s)) is not None:
            self._accounts.close_if_idle(account)
            return Refusal.after(wait_s, query.request_id, *refused)
        self._num_arrivals += 1
        waiting = Waiting(query, account, now, self._num_arrivals, wait_s)
        self._waiting[query.request_id] = waiting
        queue.order.add(waiting)
        account.num_waiting += 1
        if not has_place:
            queue.drain.wait(now)
        if account.is_full:
            account.drain.wait(now)
        if waiting.expires_s is not None:
            self._deadlines.put(waiting)
        return Wait(wait_s)

    def _why_refused(
        self, query: RouteQuery, queue: ModelQueue, account: Account, wait_s: float
    ) -> tuple[RefusalReason, str] | None:
        limit = self._config.max_queued_requests
        if not account.may_queue or (account.is_full and limit == 0):
            return RefusalReason.TENANT_LIMIT, describe_limits(account)
        if queue.num_waiting >= limit:
            return RefusalReason.QUEUE_FULL, describe_queue(queue.num_waiting, limit)
        for name, limit_s in (("queue_timeout", query.queue_timeout_s), ("timeout", query.timeout_s)):
            if limit_s is not None and wait_s > limit_s:
                return RefusalReason.DEADLINE, describe_wait(name, limit_s, wait_s)
        return None

    def _refuse_expired(self, waiting: Waiting, now: float) -> Refusal:
        query, waited_s = waiting.query, now - waiting.arrived_s
        if query.queue_timeout_s is not None and waited_s >= query.queue_timeout_s:
            reason, name, limit_s = RefusalReason.QUEUE_TIMEOUT, "queue_timeout", query.queue_timeout_s
        else:
            reason, name, limit_s = RefusalReason.DEADLINE, "timeout", query.timeout_s or 0.0
        detail = f"it waited {waited_s:.3g} s for its turn, its {name} is {limit_s:g} s"
        wait_s = self._queues[query.model].wait_s(query, waiting.account, now, has_place=False)
        return Refusal.after(wait_s, query.request_id, reason, detail)

    def _take_out(self, waiting: Waiting, now: float) -> None:
        """Of the queue, for another reason than its turn."""
        queue = self._queues[waiting.query.model]
        queue.order.remove(waiting)
        self._leave(waiting, queue, now)
        self._accounts.close_if_idle(waiting.account)

    def _leave(self, waiting: Waiting, queue: ModelQueue, now: float) -> None:
        account = waiting.account
        del self._waiting[waiting.query.request_id]
        self._deadlines.discard(waiting)
        account.num_waiting -= 1
        if account.num_waiting == 0:
            account.drain.rest(now)
        if queue.num_waiting == 0:
            queue.drain.rest(now)


def _would_pass_others(queue: ModelQueue, can_place: CanPlace) -> bool:
    return queue.num_waiting > 0 and queue.order.has_next(can_place)


def _expiry(waiting: Waiting) -> float:
    return math.inf if waiting.expires_s is None else waiting.expires_s


def _assert(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"admission's books do not balance: {what}")
