"""FairQueue: tenants that wait share the machine equally, whatever each of them sends."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from .sequence import Sequence, SequenceStatus
from .waiting_queue import HeapQueue, Key, KeyedHeap, Order, expected_prefill_tokens

PREFILL_WEIGHT = 1
DECODE_WEIGHT = 2
"""Service of a token, as in the paper: a decoded one takes longer, since it does not share its step's reads of the
weights with its neighbours in the sequence."""

_NEW_TENANTS = 64
"""After so many it is worth looking for some to forget."""


class _Tenant:
    __slots__ = ("ahead", "served", "waiting", "was_served")

    def __init__(self, waiting: HeapQueue, served: int) -> None:
        self.waiting = waiting
        self.served = served
        """The virtual counter: weighted tokens."""
        self.ahead = 0
        """Prefill of sequences taken out in the step that is being planned, not noted as served yet."""
        self.was_served = False
        """Since idle tenants were last looked for."""

    def key(self) -> Key:
        """Only with somebody waiting: the least served tenant is next, of equals the one whose first comes first."""
        first = self.waiting.first()
        if first is None:
            raise RuntimeError("a tenant for whom nothing waits has no turn")
        return (self.served + self.ahead, *self.waiting.key(first))


class _Turns:
    """Active tenants by their keys.

    A key that has grown is noticed when its tenant comes first; one that has fallen, or is new, has to be ``put``.
    """

    def __init__(self) -> None:
        self._heap: KeyedHeap[_Tenant] = KeyedHeap()

    def __iter__(self) -> Iterator[_Tenant]:
        return iter(self._heap)

    def ordered(self) -> Iterator[_Tenant]:
        """By ``least_key``."""
        return self._heap.ordered()

    def least_key(self, tenant: _Tenant) -> Key:
        """At most its key."""
        return self._heap.key(tenant)

    def put(self, tenant: _Tenant) -> None:
        self._heap.put(tenant, tenant.key())

    def discard(self, tenant: _Tenant) -> None:
        self._heap.discard(tenant)

    def first(self) -> _Tenant | None:
        while (tenant := self._heap.first()) is not None and self._heap.key(tenant) != tenant.key():
            self.put(tenant)
        return tenant


class _Turn(NamedTuple):
    """What a tenant would have taken next. Immutable."""

    key: Key
    number: int
    """Of the tenant; unique, so that what follows is not compared."""
    sequence: Sequence
    rest: Iterator[Sequence]
    tenant: _Tenant


def _take(turns: list[_Turn]) -> Sequence:
    """Whose turn is first in the heap ``turns``; his next one comes after what this one has him served."""
    turn = turns[0]
    following = next(turn.rest, None)
    if following is None:
        heapq.heappop(turns)
    else:
        served = turn.key[0] + PREFILL_WEIGHT * expected_prefill_tokens(turn.sequence)
        key = (served, *turn.tenant.waiting.key(following))
        heapq.heapreplace(turns, turn._replace(key=key, sequence=following))
    return turn.sequence


class FairQueue:
    """Virtual token counters: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), section 4.

    A counter for each tenant adds up the weighted tokens computed for it. The next to be admitted is the first, in
    ``order``, of the tenant with the smallest counter among those that wait (are *active*). A tenant that becomes
    active is lifted to the smallest counter of the active ones, or, if there is none, to that of the tenant that was
    the last one: who was idle has saved up nothing, and who has just been served a lot is not forgiven by pausing.

    Between two tenants that both have something waiting all the time, the service received in any interval differs by
    at most 2 * max(PREFILL_WEIGHT * longest prompt, DECODE_WEIGHT * tokens that fit in the KV pool).

    That smallest counter, the floor, never falls; an idle tenant at or below it would be lifted to it anyway and can be
    forgotten. What is remembered are active tenants, those with running sequences, and those that the floor has yet to
    catch up with. Requests without a tenant are together one tenant.
    """

    counts_service = True

    def __init__(self, order: Order) -> None:
        self._order = order
        self._tenants: dict[str | None, _Tenant] = {}
        self._active = _Turns()
        self._last = _Tenant(HeapQueue(order), 0)
        """That stopped waiting most recently."""
        self._ahead: list[_Tenant] = []
        self._num_waiting = 0
        self._num_new_tenants = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for tenant in self._active for sequence in tenant.waiting)

    @property
    def num_tenants(self) -> int:
        """Remembered, active or not."""
        return len(self._tenants)

    def add(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence.request.tenant)
        if not tenant.waiting:
            tenant.served = max(tenant.served, self._floor())
        tenant.waiting.add(sequence)
        self._active.put(tenant)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        tenant = self._tenants[sequence.request.tenant]
        tenant.waiting.remove(sequence)
        self._num_waiting -= 1
        if sequence.status is SequenceStatus.WAITING:
            # Counted now, so that those admitted in one step take turns; what the step really computes replaces it.
            tenant.ahead += PREFILL_WEIGHT * expected_prefill_tokens(sequence)
            self._ahead.append(tenant)
        if not tenant.waiting:
            self._active.discard(tenant)
            self._last = tenant

    def first(self) -> Sequence | None:
        tenant = self._active.first()
        return tenant.waiting.first() if tenant else None

    def in_order(self, limit: int) -> list[Sequence]:
        return list(islice(self._in_turns(), limit))

    def precedes(self, first: Sequence, second: Sequence) -> bool:
        one, other = self._tenant(first.request.tenant), self._tenant(second.request.tenant)
        if one is other:
            return one.waiting.precedes(first, second)
        return one.served + one.ahead < other.served + other.ahead

    def _in_turns(self) -> Iterator[Sequence]:
        """All; the prefill of each counts as served before the next is chosen. Looks at as few tenants as it can."""
        turns: list[_Turn] = []
        for number, tenant in enumerate(self._active.ordered()):
            while turns and turns[0].key < self._active.least_key(tenant):
                yield _take(turns)
            rest = tenant.waiting.ordered()
            heapq.heappush(turns, _Turn(tenant.key(), number, next(rest), rest, tenant))
        while turns:
            yield _take(turns)

    def note_served(self, sequence: Sequence, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        if self._ahead:
            self._settle()
        name = sequence.request.tenant
        tenant = self._tenants.get(name) or self._tenant(name)
        tenant.served += PREFILL_WEIGHT * num_prefill_tokens + DECODE_WEIGHT * num_decode_tokens
        tenant.was_served = True

    def _settle(self) -> None:
        """A step has been planned: what was counted ahead is noted as served, or was not computed."""
        for tenant in self._ahead:
            had, tenant.ahead = tenant.ahead, 0
            if had and tenant.waiting:  # once, though it may be listed for several sequences
                self._active.put(tenant)
        self._ahead.clear()

    def _floor(self) -> int:
        least = self._active.first()
        return (least or self._last).served

    def _tenant(self, name: str | None) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._num_new_tenants += 1
            if self._num_new_tenants == _NEW_TENANTS:
                self._forget_idle()
            tenant = self._tenants[name] = _Tenant(HeapQueue(self._order), self._floor())
        return tenant

    def _forget_idle(self) -> None:
        floor = min((tenant.served for tenant in self._active), default=self._last.served)
        kept = {}
        for name, tenant in self._tenants.items():
            if tenant.waiting or tenant.was_served or tenant.served > floor or tenant is self._last:
                kept[name] = tenant
                tenant.was_served = False
        self._tenants = kept
        self._num_new_tenants = 0
