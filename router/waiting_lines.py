"""Where a model's queries wait.

    Kind      those that may go to the same groups
    Lane      of these, those at one level of priority
    Line      of these, those of one tenant, first come first

The groups are asked once about a whole kind; which lane is next is a matter of priority, which line of fair service.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..worker.messages import RouteQuery
from .fair_share import Level, Share, prefill_cost
from .keyed_heap import KeyedHeap
from .tenants import Account

Restriction = tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]


def restriction(query: RouteQuery) -> Restriction:
    """What decides which groups may take a query; those with the same one are alike to ``CanPlace``."""
    return query.allowed_groups, query.excluded_groups, query.excluded_generations


@dataclass(slots=True, eq=False)
class Waiting:
    """A query in the queue."""

    query: RouteQuery
    account: Account
    arrived_s: float
    number: int
    """Counts arrivals."""
    expected_s: float
    """How long it was expected to wait when it came."""
    rank: tuple[int, int] = (0, 0)
    """Order within a tenant and a level, and age for promotion: arrival + priority * aging in ns, number."""
    line: Line = field(init=False)
    cost: float = field(init=False)
    """Service that is counted when it is taken, per unit of its tenant's weight."""
    expires_s: float | None = field(init=False)
    """When it will have waited for too long."""

    def __post_init__(self) -> None:
        self.cost = prefill_cost(self.query, self.account)
        limits_s = [limit for limit in (self.query.queue_timeout_s, self.query.timeout_s) if limit is not None]
        self.expires_s = self.arrived_s + min(limits_s) if limits_s else None


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

    def finish_tag(self) -> tuple[float, tuple[int, int]]:
        """Of the first query; of equal ones the earlier arrival comes first."""
        first = self.first
        return self.share.served + first.cost, first.rank


class Lane:
    """The queries of one kind at one level."""

    __slots__ = ("kind", "level", "lines", "oldest", "runnable")

    def __init__(self, kind: Kind, level: Level) -> None:
        self.kind = kind
        self.level = level
        self.lines: dict[str | None, Line] = {}
        self.runnable: KeyedHeap[Line] = KeyedHeap(Line.finish_tag)
        """Without the lines of tenants that were found to be at their limits."""
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
        """Lanes with runnable lines, best level first."""
        self.due: KeyedHeap[Lane] = KeyedHeap(_oldest_rank)
        """All lanes, that with the oldest query first: it is promoted first."""

    def any_query(self) -> RouteQuery:
        lane = next(iter(self.lanes.values()))
        return next(iter(lane.lines.values())).first.query


def _rank(waiting: Waiting) -> tuple[int, int]:
    return waiting.rank


def _first_rank(line: Line) -> tuple[int, int]:
    return line.first.rank


def _oldest_rank(lane: Lane) -> tuple[int, int]:
    return lane.oldest_waiting().rank


def _level(lane: Lane) -> int:
    return lane.level.value
