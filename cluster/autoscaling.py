"""How many worker groups a model should have, for Serve's autoscaler: by the time to the first token that the router
expects, and by free KV blocks. Not by the number of requests, which says little about either.

Serve asks the policy in its controller; what it goes by comes from the groups' replicas (``record_autoscaling_stats``),
which ask the router. Serve averages over a while, waits before it acts, and keeps to the bounds.
"""

from __future__ import annotations

import math
from typing import Any

TTFT, FREE_SHARE = "expected_ttft_s", "free_share"
"""Names of the numbers that replicas give."""

DEFAULT_TARGET_TTFT_MS = 1000.0

LEAST_FREE_SHARE = 0.1
"""With fewer blocks free, new sequences soon wait for old ones to end."""
RELAXED = 0.25
"""Groups are taken away where the expected time is below this part of the target …"""
MOST_USED_SHARE = 0.6
"""… and the blocks in use would be no more than this part of what is left."""
MOST_GROWTH = 2.0

UPSCALE_DELAY_S = 20.0
DOWNSCALE_DELAY_S = 300.0
"""A group takes long to come up and is soon missed: they are added quickly, and taken away slowly."""


def wanted_groups(num_groups: int, expected_ttft_s: float, free_share: float, target_ttft_s: float) -> int:
    """How many groups there should be where ``num_groups`` serve, before bounds."""
    if expected_ttft_s > target_ttft_s:
        return math.ceil(num_groups * min(MOST_GROWTH, expected_ttft_s / target_ttft_s))
    if free_share < LEAST_FREE_SHARE:
        return num_groups + 1
    is_relaxed = expected_ttft_s < RELAXED * target_ttft_s
    if is_relaxed and num_groups > 1 and (1.0 - free_share) * num_groups / (num_groups - 1) < MOST_USED_SHARE:
        return num_groups - 1
    return num_groups


class ByOutlook:
    """Serve's policy: made with ``target_ttft_s``, called with an AutoscalingContext."""

    def __init__(self, target_ttft_s: float) -> None:
        self._target_ttft_s = target_ttft_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        told = context.aggregated_metrics or {}
        ttft_s, free_share = _mean(told.get(TTFT)), _mean(told.get(FREE_SHARE))
        if ttft_s is None or free_share is None:  # nothing has been told yet
            return context.target_num_replicas, {}
        num_groups = max(1, context.current_num_replicas)
        wanted = wanted_groups(num_groups, ttft_s, free_share, self._target_ttft_s)
        is_on_its_way = context.target_num_replicas > num_groups and wanted >= num_groups
        return (max(wanted, context.target_num_replicas) if is_on_its_way else wanted), {}


def _mean(by_replica: dict[Any, float] | None) -> float | None:
    """All replicas tell of the whole model; they differ by the moment."""
    values = list((by_replica or {}).values())
    return sum(values) / len(values) if values else None


def autoscaling_options(least: int, most: int, target_ttft_s: float, downscale_delay_s: float) -> dict[str, Any]:
    """Serve's ``autoscaling_config``."""
    return {
        "min_replicas": least,
        "initial_replicas": least,
        "max_replicas": most,
        "upscale_delay_s": UPSCALE_DELAY_S,
        "downscale_delay_s": downscale_delay_s,
        "policy": {
            "policy_function": f"{ByOutlook.__module__}:{ByOutlook.__name__}",
            "policy_kwargs": {"target_ttft_s": target_ttft_s},
        },
    }
