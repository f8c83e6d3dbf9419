"""RouterConfig: what a router is told when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .policies import PolicyName
from .tenants import TenantLimits


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Only ``policy`` steers where requests go."""

    policy: PolicyName = "cost"
    max_index_bytes: int = 1 << 30

    max_queued_requests: int | None = 1024
    """That wait here, by model, while no group has room; None: all go to groups at once, and wait there."""
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    knows_tenants: bool = True
    """Requests of different tenants take turns in the queue; else they are served as if they were one's."""
    priority_aging_s: float = 60.0

    shares: bool = False
    """Other routers serve the same groups: what is decided is kept for them until ``take_shared``."""
    group_timeout_s: float = 5.0
    """A group that has not reported for so long is dropped."""
    reservation_timeout_s: float = 10.0
    """A request that its group has not received by then is taken to be lost on the way."""
    prediction_timeout_s: float = 120.0
    """A request that is not computed by then stands for no blocks any more."""
    snapshot_retry_s: float = 1.0
    max_sessions: int = 100_000
    """Sessions whose last group is remembered."""
    num_explained: int = 256
    """Decisions kept for ``explain``."""
    sweep_entries: int = 4096
    """Index entries cleaned with each report while there is something to clean."""
