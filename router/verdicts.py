"""What admission says of a query that arrives: it goes, it waits, or it is refused, with a sentence for the user."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .tenants import Account

MAX_RETRY_AFTER_S = 3600.0
_MAX_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class Go:
    """A group may be chosen for it now; it counts as running."""


@dataclass(frozen=True, slots=True)
class Wait:
    """``Admission.take_next`` or ``expire`` will give it back."""

    expected_s: float
    """0.0 where nothing is known."""


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

    @classmethod
    def after(cls, wait_s: float, request_id: str, reason: RefusalReason, detail: str) -> Refusal:
        """``wait_s``: of a like request that came now."""
        return cls(request_id, reason, detail, min(max(1.0, wait_s), MAX_RETRY_AFTER_S))


GO = Go()
Verdict = Go | Wait | Refusal


def describe_queue(num_waiting: int, limit: int) -> str:
    """Why no more may wait for a model."""
    waiting = "1 request waits" if num_waiting == 1 else f"{num_waiting:,} requests wait"
    return f"{waiting} already, --router-max-queued-requests is {limit}"


def describe_wait(name: str, limit_s: float, wait_s: float) -> str:
    """Why a deadline cannot be met."""
    return f"it would wait about {wait_s:.3g} s, its {name} is {limit_s:g} s"


def describe_limits(account: Account) -> str:
    """Why no more of a tenant may wait."""
    name, limits = account.tenant, account.limits
    who = "requests without a tenant are one tenant; it" if name is None else f"tenant '{name[:_MAX_NAME_CHARS]}'"
    running = "" if limits.max_running_requests is None else f"; max_running_requests is {limits.max_running_requests}"
    return (
        f"{who} has {account.num_running:,} requests running and {account.num_waiting:,} waiting, "
        f"max_queued_requests is {limits.max_queued_requests}{running}"
    )
