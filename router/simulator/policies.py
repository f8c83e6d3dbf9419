"""Who decides which group a request goes to: the production router, or a simple rule to compare it with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ...worker.errors import ConfigurationError
from ...worker.messages import GroupReport, RouteQueries, RouteQuery
from ..router import Router, RouterConfig


class Choice(NamedTuple):
    group: str
    expected_cached_tokens: int = 0


class Policy(Protocol):
    def report(self, report: GroupReport, now: float) -> bool:
        """What a group says; True asks it for a snapshot of its cache."""
        ...

    def route(self, query: RouteQuery, now: float) -> Choice | None:
        """None: no group can take it."""
        ...


class CostPolicy:
    """The production router as it is."""

    def __init__(self, groups: Sequence[str], rng: random.Random) -> None:
        self.router = Router(RouterConfig(), rng)

    def report(self, report: GroupReport, now: float) -> bool:
        return self.router.report(report, now)

    def route(self, query: RouteQuery, now: float) -> Choice | None:
        (decision,) = self.router.route(RouteQueries("", (query,)), now).decisions
        return None if decision.group is None else Choice(decision.group, decision.expected_cached_tokens)


class RoundRobin:
    """One group after the other."""

    def __init__(self, groups: Sequence[str], rng: random.Random) -> None:
        self._groups = itertools.cycle(groups)

    def report(self, report: GroupReport, now: float) -> bool:
        return False

    def route(self, query: RouteQuery, now: float) -> Choice:
        return Choice(next(self._groups))


class LeastLoaded:
    """The group with the fewest requests that were sent there and are not known to be finished; of several, any."""

    def __init__(self, groups: Sequence[str], rng: random.Random) -> None:
        self._outstanding: dict[str, set[str]] = {group: set() for group in groups}
        self._rng = rng

    def report(self, report: GroupReport, now: float) -> bool:
        self._outstanding[report.group] -= {entry.request_id for entry in report.progress if entry.finished}
        return False

    def route(self, query: RouteQuery, now: float) -> Choice:
        fewest = min(map(len, self._outstanding.values()))
        group = self._rng.choice([group for group, open_ones in self._outstanding.items() if len(open_ones) == fewest])
        self._outstanding[group].add(query.request_id)
        return Choice(group)


_POLICIES: dict[str, Callable[[Sequence[str], random.Random], Policy]] = {
    "cost": CostPolicy,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
}
POLICIES = tuple(_POLICIES)
"""Names for ``make_policy``."""


def make_policy(name: str, groups: Sequence[str], rng: random.Random) -> Policy:
    """Raises ConfigurationError when there is no such policy."""
    if name not in _POLICIES:
        raise ConfigurationError(f"--policy: must be one of {', '.join(POLICIES)}, got {name}")
    return _POLICIES[name](groups, rng)
