"""What the sampler needs to know of one row of logits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How the next token of one sequence is drawn. ``position`` counts output tokens from 0."""

    seed: int
    branch: int
    position: int
    temperature: float
    top_p: float
    top_k: int | None
    banned_token_ids: tuple[int, ...] = ()
    """Cannot be drawn: the stop tokens, until there are ``min_tokens``."""
