"""What the page shows of the routers' decisions: ids and numbers; nothing of a prompt is known to a router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_DECISIONS = 24
MOST_CANDIDATES = 4

_SHOWN = (
    *("request_id", "model", "reason", "detail", "age_s", "made_at_s", "queued_s", "num_prompt_tokens", "group"),
    *("expected_cached_tokens", "actual_cached_tokens", "expected_ttft_s", "actual_ttft_s", "num_candidates"),
)
_SHOWN_OF_CANDIDATES = ("group", "knowledge", "has_room", "num_sequences", "cached_tokens", "expected_ttft_s", "cost")


def shown(decision: Mapping[str, Any]) -> dict[str, Any]:
    """One decision as ``/debug/route`` has it, with its first candidates: the chosen one and the cheapest."""
    candidates = [
        {name: candidate[name] for name in _SHOWN_OF_CANDIDATES}
        for candidate in decision["candidates"][:MOST_CANDIDATES]
    ]
    return {name: decision[name] for name in _SHOWN} | {"candidates": candidates}
