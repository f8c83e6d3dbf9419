"""A decision with everything that led to it, for answers, metrics and people who ask why."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

from .cost import Cost
from .knowledge import KnowledgeState


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
    ONLY = "only"
    """One group was left to choose from."""
    UNKNOWN_MODEL = "unknown_model"
    NO_GROUP = "no_group"
    """Every group of the model is draining, excluded or gone."""


class Candidate(NamedTuple):
    """One group as it was seen when the request could have gone there."""

    group: str
    generation: int
    knowledge: KnowledgeState
    cached_tokens: int
    cost: Cost

    def explain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "group": self.group,
            "generation": self.generation,
            "knowledge": self.knowledge.value,
            "cached_tokens": self.cached_tokens,
            "cost": {**self.cost._asdict(), "total_s": self.cost.total_s},
        }


@dataclass(slots=True)
class Decision:
    """One answered query. ``actual_cached_tokens`` is filled in when the group has reported the prefill."""

    request_id: str
    model: str
    reason: Reason
    made_at_s: float
    num_prompt_tokens: int
    chosen: Candidate | None
    candidates: tuple[Candidate, ...]
    actual_cached_tokens: int | None = None

    def explain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "request_id": self.request_id,
            "model": self.model,
            "reason": self.reason.value,
            "made_at_s": self.made_at_s,
            "num_prompt_tokens": self.num_prompt_tokens,
            "group": self.chosen.group if self.chosen else None,
            "expected_cached_tokens": self.chosen.cached_tokens if self.chosen else 0,
            "actual_cached_tokens": self.actual_cached_tokens,
            "candidates": [candidate.explain() for candidate in self.candidates],
        }


def reason_for(chosen: Candidate, candidates: tuple[Candidate, ...]) -> Reason:
    """The word for a choice that was made."""
    if len(candidates) == 1:
        return Reason.ONLY
    most = max(candidate.cached_tokens for candidate in candidates)
    if most == 0:
        return Reason.COLD
    if chosen.cached_tokens < most:
        return Reason.LOAD
    alike = sum(candidate.cached_tokens == most for candidate in candidates)
    return Reason.PREFIX if alike == 1 else Reason.EVEN
