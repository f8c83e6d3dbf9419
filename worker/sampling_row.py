"""What the sampler is told of each row of logits, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .messages import TokenLogprobs
from .sampling_state import RowEnd, SamplingState

Candidate: TypeAlias = tuple[int, float]
"""A token id and its log-probability."""


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
    num_candidates: int = 0
    """Beam search: nothing is drawn; the so many likeliest tokens are wanted, with their log-probabilities."""
    min_p: float = 0.0
    """Tokens with less than so many times the likeliest one's probability are left out; 0.0: off."""
    num_logprobs: int | None = None
    """So many of the likeliest tokens are told with the drawn one, and their log-probabilities; None: nothing is."""
    state: SamplingState | None = None
    """What else the token depends on: penalties, bias, words and tokens that are banned or allowed, a grammar. Its
    branch has no other; only the thread that samples reads it. It knows the tokens before ``position`` by then."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave for its rows."""

    token_ids: list[int | None]
    """The drawn token of each row; None where none could be drawn. A row of a beam search has its likeliest."""
    candidates: Mapping[int, tuple[Candidate, ...]] = field(default_factory=dict)
    """Row → its ``num_candidates`` likeliest tokens that are not banned, likeliest first; of equals the lowest id.

    Log-probabilities are those of the model: float32 log-softmax of the logits, before anything is banned."""
    nan_rows: frozenset[int] = frozenset()
    """Of the rows without a token, those whose logits gave none: NaN among them, or none that is finite."""
    ends: Mapping[int, RowEnd] = field(default_factory=dict)
    """Of the rows without a token, those that what their request asks for has brought to an end."""
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """Row → log-probabilities of its token and of the ``num_logprobs`` likeliest, where they are wanted.

    They are those of the model: float32 log-softmax of the logits, before anything bends them."""
    was_held_up: bool = False
    """A graph was recorded ahead of the step: how long it took says nothing of the next one."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """For each of the plan's ``scored`` runs: one for each of its tokens, of the one that follows it."""
    hidden_sums: tuple[NDArray[np.float32], ...] = ()
    """For each of the plan's ``pooled`` runs: ``[hidden]``."""
