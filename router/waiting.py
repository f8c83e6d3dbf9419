"""Whose turn is next among the queries that wait for a place in one model's groups.

Lower priority values first. Between tenants of equal priority by weighted fair service, within a tenant first come
first served. A query that no group may take now is passed over, it keeps its place in this order.

**Aging** has the meaning that it has in the groups' schedulers: a unit of priority is worth ``aging_s`` seconds of
waiting. A query waits at the *level* of its priority. Once it has waited as long as its priority is worse than the best
level that could be served, it moves to that level: it is then as urgent as those, not more, and fair service decides.
So a tenant that sends a flood of low priority never gets more than its share, however old the flood is.

**Fair service** is counted for each level, in tokens as in virtual token counters (Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024), and divided by the tenant's weight. Next is the tenant whose counter would be the
lowest after its next query: the finish tag of self-clocked fair queueing (Golestani, "A Self-Clocked Fair Queueing
Scheme for Broadband Applications", INFOCOM 1994). The tag of the query taken last is the level's virtual time, to
which whoever begins to wait is lifted. Two tenants that both wait all the time have then been served, per unit of
weight, equally within the work of one query of each (and of the outputs that are not finished, which are counted when
they are). In the order of counters alone, as in the paper, endless newcomers could keep out whoever was served once.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

from ..worker.messages import RouteQuery
from .tenants import Account

PREFILL_WEIGHT = 1
DECODE_WEIGHT = 2
"""Service of a token, as in the groups' ``fair`` policy."""

MAX_ASKED = 64
"""Kinds of restrictions that one look for a turn asks about. With more of them waiting, the next look goes on there."""
MAX_PROMOTED = 64
"""Queries of one kind that one look lifts to a better level, the oldest first; the next look goes on."""

_SWEEP_SHARES = 64
_NS_PER_S = 1_000_000_000

Restriction = tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]
CanPlace = Callable[[RouteQuery], bool]
Item = TypeVar("Item", bound=Hashable)


def restriction(query: RouteQuery) -> Restriction:
    """What decides which groups may take a query; those with the same one are alike to ``CanPlace``."""
    return query.allowed_groups, query.excluded_groups, query.excluded_generations


class KeyedHeap(Generic[Item]):
    """Items in the order of ``key(item)``, in O(log n) amortised.

    A key that has grown is noticed when its item comes first; after one has fallen its item must be put again. With
    ``is_fixed`` a key never changes.
    """

    __slots__ = ("_entries", "_heap", "_is_fixed", "_key", "_num_puts")

    def __init__(self, key: Callable[[Item], Any], *, is_fixed: bool = False) -> None:
        self._key = key
        self._is_fixed = is_fixed
        self._heap: list[tuple[Any, int, Item]] = []
        self._entries: dict[Item, tuple[Any, int, Item]] = {}
        """The entries that are good; the heap also has outdated ones, never more than good ones."""
        self._num_puts = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[Item]:
        """In no particular order."""
        return iter(self._entries)

    def put(self, item: Item) -> None:
        key = self._key(item)
        present = self._entries.get(item)
        if present is not None and present[0] == key:
            return
        self._num_puts += 1  # unique, so that items are never compared
        entry = self._entries[item] = (key, self._num_puts, item)
        heapq.heappush(self._heap, entry)
        self._compact()

    def discard(self, item: Item) -> None:
        if self._entries.pop(item, None) is not None:
            self._compact()

    def first(self) -> Item | None:
        while self._heap:
            entry = self._heap[0]
            item = entry[2]
            if self._entries.get(item) is not entry:
                heapq.heappop(self._heap)
            elif self._is_fixed or entry[0] == (key := self._key(item)):
                return item
            else:
                entry = self._entries[item] = (key, entry[1], item)
                heapq.heapreplace(self._heap, entry)
        return None

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._entries):
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)


@dataclass(slots=True, eq=False)
class Waiting:
    """A query in the queue."""

    query: RouteQuery
    account: Account
    arrived_s: float
    number: int
    """Counts arrivals."""
    expires_s: float | None
    """When it will have waited for too long."""
    expected_s: float
    """How long it was expected to wait when it came."""
    rank: tuple[int, int] = (0, 0)
    """Order within a tenant and a level, and age for promotion: arrival + priority * aging in ns, number."""
    line: Line = field(init=False)
    cost: float = field(init=False)
    """Service that is counted when it is taken, per unit of its tenant's weight."""

    def __post_init__(self) -> None:
        self.cost = prefill_cost(self.query, self.account)


def prefill_cost(query: RouteQuery, account: Account) -> float:
    return PREFILL_WEIGHT * max(1, query.num_prompt_tokens) / account.limits.weight


class Share:
    """A tenant at one level."""

    __slots__ = ("num_waiting", "served")

    def __init__(self, served: float) -> None:
        self.served = served
        """Virtual counter: service divided by weight."""
        self.num_waiting = 0


class Level:
    """The fair shares of one priority; exists while somebody waits there."""

    __slots__ = ("_next_sweep", "num_waiting", "shares", "total_weight", "value", "virtual_time")

    def __init__(self, value: int) -> None:
        self.value = value
        self.virtual_time = 0.0
        self.num_waiting = 0
        self.total_weight = 0.0
        """Of the tenants that wait here."""
        self.shares: dict[str | None, Share] = {}
        self._next_sweep = _SWEEP_SHARES

    def join(self, account: Account) -> Share:
        """One more of the tenant waits. Who begins to wait has saved up nothing."""
        share = self._share(account.tenant)
        if share.num_waiting == 0:
            share.served = max(share.served, self.virtual_time)
            self.total_weight += account.limits.weight
        share.num_waiting += 1
        self.num_waiting += 1
        return share

    def leave(self, share: Share, account: Account) -> None:
        share.num_waiting -= 1
        self.num_waiting -= 1
        if share.num_waiting == 0:
            self.total_weight -= account.limits.weight

    def take(self, share: Share, cost: float) -> None:
        """One of those that wait is served. Who was passed over, since nothing could be had, has saved up nothing."""
        self.virtual_time = share.served = max(share.served + cost, self.virtual_time)

    def take_at_once(self, account: Account, cost: float) -> None:
        """The tenant is served without having waited."""
        share = self._share(account.tenant)
        if share.num_waiting == 0:
            share.served = max(share.served, self.virtual_time)
        self.take(share, cost)

    def charge(self, account: Account, cost: float) -> None:
        """Service that is known later: output."""
        self._share(account.tenant).served += cost

    def num_ahead(self, account: Account) -> float:
        """Queries of this level that are served until one more of the tenant has been, itself included.

        At most all that wait; and while the tenant gets its share, its own ones divided by that share.
        """
        share, weight = self.shares.get(account.tenant), account.limits.weight
        num_own = share.num_waiting if share else 0
        total_weight = self.total_weight + (0.0 if num_own else weight)
        return min(self.num_waiting + 1, (num_own + 1) * total_weight / weight)

    def _share(self, tenant: str | None) -> Share:
        share = self.shares.get(tenant)
        if share is None:
            if len(self.shares) >= self._next_sweep:
                self._sweep()
            share = self.shares[tenant] = Share(self.virtual_time)
        return share

    def _sweep(self) -> None:
        """Forget whom ``join`` would lift anyway."""
        kept = {name: share for name, share in self.shares.items() if share.num_waiting or self._is_ahead(share)}
        self.shares = kept
        self._next_sweep = max(_SWEEP_SHARES, 2 * len(kept))

    def _is_ahead(self, share: Share) -> bool:
        return share.served > self.virtual_time


class Line:
    """The queries of one tenant in a lane, first come first."""

    __slots__ = ("account", "first", "lane", "queries", "share")

    def __init__(self, lane: Lane, account: Account, share: Share, first: Waiting) -> None:
        self.lane = lane
        self.account = account
        self.share = share
        self.queries: KeyedHeap[Waiting] = KeyedHeap(_rank, is_fixed=True)
        self.first = first

    def add(self, waiting: Waiting) -> None:
        self.queries.put(waiting)
        if waiting.rank < self.first.rank:
            self.first = waiting

    def remove(self, waiting: Waiting) -> bool:
        """Whether any are left."""
        self.queries.discard(waiting)
        first = self.queries.first()
        if first is not None:
            self.first = first
        return first is not None

    def turn(self) -> tuple[float, tuple[int, int]]:
        """Finish tag of the first; of equal ones the earlier arrival comes first."""
        first = self.first
        return self.share.served + first.cost, first.rank


class Lane:
    """The queries of one kind at one level."""

    __slots__ = ("kind", "level", "lines", "oldest", "turns")

    def __init__(self, kind: Kind, level: Level) -> None:
        self.kind = kind
        self.level = level
        self.lines: dict[str | None, Line] = {}
        self.turns: KeyedHeap[Line] = KeyedHeap(Line.turn)
        """Without those whose tenant was found to be at its limit."""
        self.oldest: KeyedHeap[Line] = KeyedHeap(_first_rank)

    def oldest_waiting(self) -> Waiting:
        line = self.oldest.first()
        if line is None:
            raise RuntimeError("an empty lane has no oldest")
        return line.first


class Kind:
    """The queries that may go to the same groups."""

    __slots__ = ("active", "due", "lanes", "restriction")

    def __init__(self, restriction: Restriction) -> None:
        self.restriction = restriction
        self.lanes: dict[int, Lane] = {}
        self.active: KeyedHeap[Lane] = KeyedHeap(_level, is_fixed=True)
        """Lanes that may have a turn, best level first."""
        self.due: KeyedHeap[Lane] = KeyedHeap(_oldest_rank)

    def any_query(self) -> RouteQuery:
        lane = next(iter(self.lanes.values()))
        return next(iter(lane.lines.values())).first.query


class Turns:
    """One model's queue. ``aging_s`` of 0: in the order of arrival, whatever the priority."""

    def __init__(self, aging_s: float) -> None:
        self.levels: dict[int, Level] = {}
        self.kinds: OrderedDict[Restriction, Kind] = OrderedDict()
        """Those that have not been asked about for the longest first."""
        self.num_waiting = 0
        self.lacks_places = False
        """Whether the last look passed over some for whom no group had a place."""
        self._aging_ns = round(aging_s * _NS_PER_S)
        self._parked: dict[Account, dict[Line, None]] = {}
        """Lines of tenants at their limit, taken out of their lanes' turns."""

    def level_of(self, query: RouteQuery) -> int:
        """At which it begins to wait."""
        return query.priority if self._aging_ns else 0

    def add(self, waiting: Waiting) -> None:
        query = waiting.query
        effective_arrival_ns = round(waiting.arrived_s * _NS_PER_S) + query.priority * self._aging_ns
        waiting.rank = (effective_arrival_ns, waiting.number)
        key = restriction(query)
        kind = self.kinds.get(key)
        if kind is None:
            kind = self.kinds[key] = Kind(key)
        self._insert(kind, waiting, self.level_of(query))
        self.num_waiting += 1

    def remove(self, waiting: Waiting) -> None:
        self._take_out(waiting, waiting.line)
        self.num_waiting -= 1

    def take_next(self, can_place: CanPlace, now: float) -> tuple[Waiting, Level] | None:
        """Whose turn it is, taken out, and the level that it was served at; None if nobody's.

        ``can_place`` is asked once for each kind of restriction, and must depend on nothing else of the query.
        """
        kinds = self._placeable(can_place)
        if not kinds:
            return None
        best = min(lane.level.value for kind in kinds if (lane := self._first_lane(kind)))
        if len(self.levels) > 1:
            for kind in kinds:
                self._promote(kind, best, now)
        lanes = [kind.lanes[best] for kind in kinds if best in kind.lanes]
        lines = [line for lane in lanes if (line := self._first_line(lane))]
        line = lines[0] if len(lines) == 1 else min(lines, key=Line.turn)
        waiting, level = line.first, line.lane.level
        level.take(line.share, waiting.cost)
        self.remove(waiting)
        return waiting, level

    def has_turn(self, can_place: CanPlace) -> bool:
        """Whether somebody who waits could go now."""
        return bool(self._placeable(can_place))

    def may_run_again(self, account: Account) -> None:
        """The tenant is below its limit."""
        for line in self._parked.pop(account, ()):
            self._let_turn(line)

    def num_ahead(self, query: RouteQuery, account: Account) -> float:
        """About how many are served until a query like this one that came now has been, itself included."""
        value = self.level_of(query)
        same = self.levels.get(value)
        num_better = sum([level.num_waiting for level in self.levels.values() if level.value < value])
        return num_better + (same.num_ahead(account) if same else 1)

    def check(self) -> list[Waiting]:
        """All that wait. Raises AssertionError if the books do not balance."""
        found = []
        for kind in self.kinds.values():
            _assert(bool(kind.lanes) and set(kind.due) == set(kind.lanes.values()), "lanes")
            for value, lane in kind.lanes.items():
                _assert(lane.level is self.levels.get(value) and bool(lane.lines), "a lane's level")
                _assert(set(lane.oldest) == set(lane.lines.values()), "a lane's oldest")
                for line in lane.lines.values():
                    is_parked = line in self._parked.get(line.account, {})
                    _assert(len(line.queries) > 0 and (line in lane.turns) != is_parked, "a line has one place")
                    _assert(is_parked or lane in kind.active, "a lane with turns is active")
                    _assert(line.account.is_full or not is_parked, "parked without reason")
                    found += list(line.queries)
        for level in self.levels.values():
            counts = [share.num_waiting for share in level.shares.values()]
            _assert(level.num_waiting == sum(counts) > 0, "a level's count")
        _assert(sum(level.num_waiting for level in self.levels.values()) == self.num_waiting == len(found), "count")
        return found

    def _placeable(self, can_place: CanPlace) -> list[Kind]:
        asked = list(islice(self.kinds.values(), MAX_ASKED))
        active = [kind for kind in asked if self._first_lane(kind)]
        placeable = [kind for kind in active if can_place(kind.any_query())]
        self.lacks_places = len(placeable) < len(active)
        if len(self.kinds) > MAX_ASKED:
            for kind in asked:
                self.kinds.move_to_end(kind.restriction)
        return placeable

    def _first_lane(self, kind: Kind) -> Lane | None:
        """The best level at which somebody may run."""
        while (lane := kind.active.first()) is not None and self._first_line(lane) is None:
            kind.active.discard(lane)
        return lane

    def _first_line(self, lane: Lane) -> Line | None:
        """Whose turn it is in the lane; lines of tenants at their limit are put aside."""
        while (line := lane.turns.first()) is not None and line.account.is_full:
            lane.turns.discard(line)
            self._park(line)
        return line

    def _promote(self, kind: Kind, best: int, now: float) -> None:
        """Lift to level ``best`` who has waited long enough for it."""
        oldest_allowed_ns = round(now * _NS_PER_S) + best * self._aging_ns
        no_worse = []
        for _ in range(MAX_PROMOTED):
            lane = kind.due.first()
            if lane is None or lane.oldest_waiting().rank[0] > oldest_allowed_ns:
                break
            if lane.level.value <= best:
                kind.due.discard(lane)
                no_worse.append(lane)
            else:
                waiting = lane.oldest_waiting()
                line = waiting.line
                self._insert(kind, waiting, best)
                self._take_out(waiting, line)
        for lane in no_worse:
            kind.due.put(lane)

    def _insert(self, kind: Kind, waiting: Waiting, value: int) -> None:
        account = waiting.account
        level = self.levels.get(value)
        if level is None:
            level = self.levels[value] = Level(value)
        lane = kind.lanes.get(value)
        if lane is None:
            lane = kind.lanes[value] = Lane(kind, level)
        share = level.join(account)
        line = lane.lines.get(account.tenant)
        if line is None:
            line = lane.lines[account.tenant] = Line(lane, account, share, waiting)
        line.add(waiting)
        waiting.line = line
        if line.first is waiting:
            lane.oldest.put(line)
            kind.due.put(lane)
            self._give_place(line)

    def _take_out(self, waiting: Waiting, line: Line) -> None:
        lane, account = line.lane, waiting.account
        lane.level.leave(line.share, account)
        was_first = line.first is waiting
        if not line.remove(waiting):
            self._end_line(line)
        elif was_first and line in lane.turns:
            lane.turns.put(line)  # the new first may be a smaller one
        if lane.level.num_waiting == 0:
            del self.levels[lane.level.value]

    def _end_line(self, line: Line) -> None:
        lane, kind, parked = line.lane, line.lane.kind, self._parked.get(line.account)
        del lane.lines[line.account.tenant]
        lane.turns.discard(line)
        lane.oldest.discard(line)
        if parked is not None:
            parked.pop(line, None)
            if not parked:
                del self._parked[line.account]
        if not lane.lines:
            del kind.lanes[lane.level.value]
            kind.active.discard(lane)
            kind.due.discard(lane)
            if not kind.lanes:
                del self.kinds[kind.restriction]

    def _give_place(self, line: Line) -> None:
        if line.account.is_full and line not in line.lane.turns:
            self._park(line)
        else:
            self._let_turn(line)

    def _let_turn(self, line: Line) -> None:
        line.lane.turns.put(line)
        line.lane.kind.active.put(line.lane)

    def _park(self, line: Line) -> None:
        self._parked.setdefault(line.account, {})[line] = None


def _rank(waiting: Waiting) -> tuple[int, int]:
    return waiting.rank


def _first_rank(line: Line) -> tuple[int, int]:
    return line.first.rank


def _oldest_rank(lane: Lane) -> tuple[int, int]:
    return lane.oldest_waiting().rank


def _level(lane: Lane) -> int:
    return lane.level.value


def _assert(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"the waiting queries' books do not balance: {what}")
