"""What a group's report cannot say: numbers that no group has, which would spoil decisions about all the others."""

from __future__ import annotations

import math

from ..worker.messages import GroupReport

_MOST = 1 << 50
"""Of anything that is counted."""
_LEAST_RATE = 1e-6
"""Tokens a second; the time of a token must be a number too."""
_MOST_SECONDS = 1e6
_COUNTS = {
    "block_size": 1,
    "max_num_seqs": 1,
    "num_blocks": 0,
    "num_free_blocks": 0,
    "num_running": 0,
    "num_waiting": 0,
    "num_uncomputed_prompt_tokens": 0,
}
"""Field → its least value."""
_SECONDS = ("decode_step_s", "prefill_context_s", "oldest_news_age_s")


def impossible(report: GroupReport) -> str | None:
    """Which field has which value and what it could have; None for a report that can be."""
    for name, least in _COUNTS.items():
        value = getattr(report, name)
        if type(value) is not int or not least <= value <= _MOST:
            return f"{name} is {_shortened(value)}; it must be a whole number from {least} to {_MOST}"
    for name in _SECONDS:
        value = getattr(report, name)
        if not _is_between(value, 0.0, _MOST_SECONDS):
            return f"{name} is {_shortened(value)}; it must be a time from 0 to {_MOST_SECONDS:g} s"
    rate = report.prefill_tokens_per_s
    if rate != 0 and not _is_between(rate, _LEAST_RATE, _MOST):
        return f"prefill_tokens_per_s is {_shortened(rate)}; it must be 0 or from {_LEAST_RATE:g} to {_MOST}"
    if not _is_between(report.prefill_context, 0.0, _MOST):
        return f"prefill_context is {_shortened(report.prefill_context)}; it must be from 0 to {_MOST}"
    return None


def _is_between(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and least <= value <= most


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
