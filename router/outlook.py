"""Outlook: how a new request of a model would fare, as the groups' last reports tell; autoscaling goes by it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .pool import Pool


@dataclass(frozen=True, slots=True)
class Outlook:
    """Of one model."""

    expected_ttft_s: float
    """Until its first token: the wait for a group with room, the prompts ahead of it in the best group, and its own, of
    the usual length."""
    free_share: float
    """Of all KV blocks, those that new sequences can have."""


def outlook(pool: Pool, num_waiting: int) -> Outlook | None:
    """``num_waiting``: queries that wait in the router for a group of the model. None: no group takes requests."""
    takes = pool.table.takes_requests
    if not takes.any():
        return None
    load = pool.load()
    tokens = load.backlog_tokens + load.reserved_tokens + pool.uncached_tokens.value
    prompts_s = tokens / load.prefill_tokens_per_s if pool.is_measured else np.zeros(len(tokens))
    first_s = prompts_s + load.full_step_s
    drain_per_s = pool.drain_per_s()
    queued_s = num_waiting / drain_per_s if drain_per_s > 0.0 else 0.0
    num_blocks = np.array([group.report.num_blocks for group in pool.members], float)
    free_share = load.num_free_blocks[takes].sum() / max(1.0, num_blocks[takes].sum())
    return Outlook(queued_s + float(first_s[takes].min()), float(free_share))
