"""Who decides which group a request goes to: the production router, whose policies are compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from ...worker.messages import GroupReport, RouteDecision, RouteQueries, RouteQuery
from ..config import RouterConfig
from ..policies import PolicyName
from ..router import Router


class Policy(Protocol):
    """What a simulated cluster asks. Times are on the virtual clock."""

    def report(self, report: GroupReport, now: float) -> bool:
        """What a group says; True asks it for a snapshot of its cache."""
        ...

    def route(self, query: RouteQuery, now: float) -> RouteDecision: ...

    def turns(self, now: float) -> Sequence[RouteDecision]:
        """What was decided since the last call for queries that had been answered with ``queued``."""
        ...


class RouterPolicy:
    """The production router with one of its policies."""

    def __init__(self, name: PolicyName, rng: random.Random) -> None:
        self.router = Router(RouterConfig(policy=name), rng)

    def report(self, report: GroupReport, now: float) -> bool:
        return self.router.report(report, now)

    def route(self, query: RouteQuery, now: float) -> RouteDecision:
        (decision,) = self.router.route(RouteQueries("", (query,)), now).decisions
        return decision

    def turns(self, now: float) -> Sequence[RouteDecision]:
        return [decision for decisions in self.router.take_turns(now).values() for decision in decisions]
