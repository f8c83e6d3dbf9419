"""A decision with everything that led to it, for answers, metrics and people who ask why."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..worker.messages import RouteDecision, RouteQuery
from .assessment import Assessment
from .knowledge import STATES
from .pool import Pool
from .verdicts import Refusal, Wait

NUM_EXPLAINED = 32
"""Candidates of a decision that are explained: the cheapest ones."""


class Reason(enum.Enum):
    """Why a request went where it went, or nowhere."""

    PREFIX = "prefix"
    """The group holds more of the prompt than any other that could take it."""
    LOAD = "load"
    """Another group holds more of the prompt, but would cost more."""
    COLD = "cold"
    """No group holds any of the prompt."""
    EVEN = "even"
    """Several groups hold as much of the prompt; this one was the cheapest of them."""
    PREFERRED = "preferred"
    """Without the preference of the request or its session another group would have been cheaper."""
    ONLY = "only"
    """One group was left to choose from."""
    POLICY = "policy"
    """A policy that does not look at costs."""
    UNKNOWN_MODEL = "unknown_model"
    NO_GROUP = "no_group"
    """Every group of the model is draining, excluded or gone."""
    NOT_ALLOWED = "not_allowed"
    """None of the groups that the request allows is there."""
    QUEUED = "queued"
    """No group has room; the request waits in the router."""
    QUEUE_FULL = "queue_full"
    TENANT_LIMIT = "tenant_limit"
    DEADLINE = "deadline"
    """It could not be begun within the time that it has."""
    QUEUE_TIMEOUT = "queue_timeout"
    STOPPING = "stopping"
    """The application is about to stop."""


_NOWHERE = {
    Reason.UNKNOWN_MODEL: "no worker group serves the model {model}",
    Reason.NO_GROUP: "every worker group of the model is draining, has failed on the request, or is left out by it",
    Reason.NOT_ALLOWED: "none of the worker groups that the request allows is there: {groups}",
}


@dataclass(slots=True, eq=False)
class Decision:
    """One answered query. The actual values are filled in when the group has reported the prefill."""

    request_id: str
    model: str
    reason: Reason
    made_at_s: float
    num_prompt_tokens: int
    seen: Assessment | None = None
    """For ``explain``. None: there was nothing to choose from, or it is too long ago to be explained."""
    row: int | None = None
    """Of the chosen group; None: it went nowhere."""
    group: str | None = None
    generation: int = 0
    expected_cached_tokens: int = 0
    expected_ttft_s: float = 0.0
    queued_s: float = 0.0
    """How long it had waited in the router."""
    expected_wait_s: float = 0.0
    """Of one that is queued now."""
    detail: str = ""
    retry_after_s: float | None = None
    actual_cached_tokens: int | None = None
    actual_ttft_s: float | None = None
    """Counted from the group's receipt of the request."""

    @classmethod
    def of(cls, query: RouteQuery, seen: Assessment, row: int, reason: Reason, now: float) -> Decision:
        """For one of the groups that were seen."""
        group = seen.members[row]
        return cls(
            query.request_id,
            query.model,
            reason,
            now,
            query.num_prompt_tokens,
            seen,
            row,
            group.name,
            group.generation,
            int(seen.cached_tokens[row]),
            float(seen.ttft_s[row]),
        )

    @classmethod
    def nowhere(cls, query: RouteQuery, pool: Pool | None, now: float) -> Decision:
        """Nothing is there to choose from."""
        reason = Reason.NO_GROUP
        if pool is None:
            reason = Reason.UNKNOWN_MODEL
        elif query.allowed_groups and not pool.rows_of(query.allowed_groups).any():
            reason = Reason.NOT_ALLOWED
        retry_after_s = None if reason is Reason.UNKNOWN_MODEL else 1.0
        detail = _NOWHERE[reason].format(model=query.model, groups=", ".join(query.allowed_groups))
        return cls._without_group(query, reason, now, detail=detail, retry_after_s=retry_after_s)

    @classmethod
    def queued(cls, query: RouteQuery, wait: Wait, now: float) -> Decision:
        return cls._without_group(query, Reason.QUEUED, now, expected_wait_s=wait.expected_s)

    @classmethod
    def refused(cls, query: RouteQuery, refusal: Refusal, now: float) -> Decision:
        reason = Reason(refusal.reason.value)
        return cls._without_group(query, reason, now, detail=refusal.detail, retry_after_s=refusal.retry_after_s)

    @classmethod
    def _without_group(cls, query: RouteQuery, reason: Reason, now: float, **more: Any) -> Decision:
        return cls(query.request_id, query.model, reason, now, query.num_prompt_tokens, **more)

    def answer(self) -> RouteDecision:
        """What the gateway is told."""
        is_queued = self.reason is Reason.QUEUED
        return RouteDecision(
            self.request_id,
            self.group,
            self.generation,
            self.expected_cached_tokens,
            self.reason.value,
            self.retry_after_s,
            is_queued,
            self.expected_wait_s if is_queued else self.expected_ttft_s,
            self.detail,
        )

    def explain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "request_id": self.request_id,
            "model": self.model,
            "reason": self.reason.value,
            "detail": self.detail,
            "made_at_s": self.made_at_s,
            "queued_s": self.queued_s,
            "expected_wait_s": self.expected_wait_s,
            "num_prompt_tokens": self.num_prompt_tokens,
            "group": self.group,
            "expected_cached_tokens": self.expected_cached_tokens,
            "actual_cached_tokens": self.actual_cached_tokens,
            "expected_ttft_s": self.expected_ttft_s,
            "actual_ttft_s": self.actual_ttft_s,
            "num_candidates": 0 if self.seen is None else int(self.seen.able.sum()),
            "candidates": self._explain_candidates(),
        }

    def _explain_candidates(self) -> list[dict[str, Any]]:
        """The chosen one first, then the others, the cheapest first."""
        if self.seen is None:
            return []
        by_cost = [int(row) for row in np.argsort(self.seen.total_s, kind="stable") if self.seen.able[row]]
        chosen = [] if self.row is None else [self.row]
        rows = [*chosen, *[row for row in by_cost if row != self.row]][:NUM_EXPLAINED]
        return [_explain(self.seen, row) for row in rows]


class DecisionLog:
    """The last ``num_kept`` decisions."""

    def __init__(self, num_kept: int) -> None:
        self._kept: deque[Decision] = deque(maxlen=num_kept)

    def add(self, decision: Decision) -> None:
        if len(self._kept) == self._kept.maxlen:
            self._kept[0].seen = None  # a reservation may hold the decision for long
        self._kept.append(decision)

    def explain(self, limit: int) -> list[dict[str, Any]]:
        """The newest ones, newest first."""
        newest = list(self._kept)[::-1]
        return [decision.explain() for decision in newest[: max(0, limit)]]


def _explain(seen: Assessment, row: int) -> dict[str, Any]:
    group = seen.members[row]
    parts = {name: float(values[row]) for name, values in seen.cost._asdict().items()}
    return {
        "group": group.name,
        "generation": group.generation,
        "knowledge": STATES[int(seen.knowledge[row])].value,
        "has_room": bool(seen.has_room[row]),
        "num_sequences": int(seen.num_sequences[row]),
        "cached_tokens": int(seen.cached_tokens[row]),
        "expected_ttft_s": float(seen.ttft_s[row]),
        "cost": {**parts, "total_s": float(seen.total_s[row])},
    }


def reason_for(seen: Assessment, row: int) -> Reason:
    """The word for a choice that was made by cost."""
    able = seen.able
    if able.sum() == 1:
        return Reason.ONLY
    preference_s = seen.cost.preference_s
    if preference_s.any() and preference_s[row] == 0.0:
        without_s = np.where(able, seen.total_s - preference_s, np.inf)
        if without_s.min() < without_s[row]:
            return Reason.PREFERRED
    most = seen.cached_tokens[able].max()
    if most == 0:
        return Reason.COLD
    if seen.cached_tokens[row] < most:
        return Reason.LOAD
    alike = (seen.cached_tokens[able] == most).sum()
    return Reason.PREFIX if alike == 1 else Reason.EVEN
