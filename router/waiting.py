"""Who is next among the queries that wait for a place in one model's groups.

Lower priority values first. Between tenants of equal priority by weighted fair service (``fair_share.py``), within a
tenant first come first served. A query that no group may take now is passed over, it keeps its place in this order.

**Aging** has the meaning that it has in the groups' schedulers: a unit of priority is worth ``aging_s`` seconds of
waiting. A query waits at the *level* of its priority. Once it has waited as long as its priority is worse than the best
level that could be served, it moves to that level: it is then as urgent as those, not more, and fair service decides.
So a tenant that sends a flood of low priority never gets more than its share, however old the flood is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from ..worker.messages import RouteQuery
from .fair_share import Level, prefill_cost
from .tenants import Account
from .waiting_lines import Kind, Lane, Line, Restriction, Waiting, restriction

MAX_ASKED = 64
"""Kinds of queries that one look asks about. With more of them waiting, the next look goes on there."""
MAX_PROMOTED = 64
"""Queries of one kind that one look lifts to a better level, the oldest first; the next look goes on."""

_NS_PER_S = 1_000_000_000

CanPlace = Callable[[RouteQuery], bool]
"""Whether a group that a query may go to has a free place."""


class WaitingOrder:
    """Of one model's queries. ``aging_s`` of 0: the order of arrival, whatever the priority."""

    def __init__(self, aging_s: float) -> None:
        self.levels: dict[int, Level] = {}
        self.kinds: OrderedDict[Restriction, Kind] = OrderedDict()
        """Those that have not been asked about for the longest first."""
        self.num_waiting = 0
        self.lacks_places = False
        """Whether the last look passed over some for whom no group had a place."""
        self._aging_ns = round(aging_s * _NS_PER_S)
        self._parked: dict[Account, dict[Line, None]] = {}
        """Lines of tenants at their limit, which are not runnable."""

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
        """Who is next, taken out, and the level that it was served at; None if nobody can go.

        ``can_place`` is asked once for each kind of restriction, and must depend on nothing else of the query.
        """
        kinds = self._placeable(can_place)
        if not kinds:
            return None
        best = min(lane.level.value for kind in kinds if (lane := self._first_lane(kind)))
        if len(self.levels) > 1:
            for kind in kinds:
                self._promote(kind, best, now)
        line = self._next_line(kinds, best)
        waiting, level = line.first, line.lane.level
        level.serve(line.share, waiting.cost)
        self.remove(waiting)
        return waiting, level

    def has_next(self, can_place: CanPlace) -> bool:
        """Whether somebody who waits could go now."""
        return bool(self._placeable(can_place))

    def serve_at_once(self, query: RouteQuery, account: Account) -> Level | None:
        """The query goes without having waited. Service counts only beside others that wait at its level, which is
        returned: in quiet times it costs nothing."""
        level = self.levels.get(self.level_of(query))
        if level is not None:
            level.serve_at_once(account, prefill_cost(query, account))
        return level

    def may_run_again(self, account: Account) -> None:
        """The tenant is below its limit."""
        for line in self._parked.pop(account, ()):
            self._make_runnable(line)

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
                    _assert(len(line.queries) > 0 and (line in lane.runnable) != is_parked, "a line has one place")
                    _assert(is_parked or lane in kind.active, "a lane with runnable lines is active")
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
        """Who is next in the lane; lines of tenants at their limit are put aside."""
        while (line := lane.runnable.first()) is not None and line.account.is_full:
            lane.runnable.discard(line)
            self._park(line)
        return line

    def _next_line(self, kinds: list[Kind], value: int) -> Line:
        """Of all that may run at level ``value``, where there is somebody."""
        lanes = [kind.lanes[value] for kind in kinds if value in kind.lanes]
        lines = [line for lane in lanes if (line := self._first_line(lane))]
        return lines[0] if len(lines) == 1 else min(lines, key=Line.finish_tag)

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
            self._park_or_make_runnable(line)

    def _take_out(self, waiting: Waiting, line: Line) -> None:
        lane, account = line.lane, waiting.account
        lane.level.leave(line.share, account)
        was_first = line.first is waiting
        if not line.remove(waiting):
            self._end_line(line)
        elif was_first and line in lane.runnable:
            lane.runnable.put(line)  # the new first may be a smaller one
        if lane.level.num_waiting == 0:
            del self.levels[lane.level.value]

    def _end_line(self, line: Line) -> None:
        lane = line.lane
        del lane.lines[line.account.tenant]
        lane.runnable.discard(line)
        lane.oldest.discard(line)
        self._unpark(line)
        if not lane.lines:
            self._end_lane(lane)

    def _end_lane(self, lane: Lane) -> None:
        kind = lane.kind
        del kind.lanes[lane.level.value]
        kind.active.discard(lane)
        kind.due.discard(lane)
        if not kind.lanes:
            del self.kinds[kind.restriction]

    def _park_or_make_runnable(self, line: Line) -> None:
        if line.account.is_full and line not in line.lane.runnable:
            self._park(line)
        else:
            self._make_runnable(line)

    def _make_runnable(self, line: Line) -> None:
        line.lane.runnable.put(line)
        line.lane.kind.active.put(line.lane)

    def _park(self, line: Line) -> None:
        self._parked.setdefault(line.account, {})[line] = None

    def _unpark(self, line: Line) -> None:
        parked = self._parked.get(line.account)
        if parked is not None:
            parked.pop(line, None)
            if not parked:
                del self._parked[line.account]


def _assert(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"the waiting queries' books do not balance: {what}")
