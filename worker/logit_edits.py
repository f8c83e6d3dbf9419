"""What changes the logits of a step's rows before anything is drawn, as the arrays that the sampling kernel takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..kernels.sampling import LogitBias, Penalties, TokenRuns
from .host_copy import all_to_device
from .sampling_row import SamplingRow
from .sampling_state import RowEnd, SamplingState
from .step_plan import Int32Array

_States: TypeAlias = list[SamplingState | None]
"""One for each row; None where there is none, or nothing of it counts any more."""

_Arrays: TypeAlias = dict[str, Int32Array]
"""Flat; numbers of other types by their bits."""

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """See ``SamplingTensors``."""

    banned: TokenRuns | None = None
    penalties: Penalties | None = None
    bias: LogitBias | None = None
    allowed: Tensor | None = None
    ends: Mapping[int, RowEnd] = field(default_factory=dict)
    """Rows that give no token. What is drawn for them means nothing."""


def logit_edits(rows: list[SamplingRow], vocab_size: int, device: torch.device) -> LogitEdits:
    """For the rows of one step: one copy to the device, which nobody waits for.

    Raises RuntimeError for a state that does not know the token before its row.
    """
    if not any(row.banned_token_ids or row.state is not None for row in rows):
        return LogitEdits()
    states: _States = [_state(row) for row in rows]
    ends = _ends(rows, states)
    banned = [_banned(row, state, vocab_size) for row, state in zip(rows, states, strict=True)]
    arrays = _masks(rows, states, banned, vocab_size, ends)
    arrays |= _runs("banned", [np.array(sorted(tokens), np.int32) for tokens in banned])
    arrays |= _penalties(states) | _bias(states, vocab_size)
    tensors = dict(zip(arrays, all_to_device(list(arrays.values()), device), strict=True))
    allowed = tensors.get("allowed")
    return LogitEdits(
        _token_runs(tensors, "banned"),
        _penalties_of(tensors),
        _bias_of(tensors),
        None if allowed is None else allowed.view(len(rows), -1),
        ends,
    )


def _state(row: SamplingRow) -> SamplingState | None:
    return None if row.state is None or row.state.has_ended else row.state


def _ends(rows: list[SamplingRow], states: _States) -> dict[int, RowEnd]:
    ends = ((index, state.end(rows[index].position)) for index, state in enumerate(states) if state is not None)
    return {index: end for index, end in ends if end is not None}


def _banned(row: SamplingRow, state: SamplingState | None, vocab_size: int) -> set[int]:
    """Ids beyond the vocabulary cannot be drawn anyway."""
    tokens = {*row.banned_token_ids, *(state.banned_token_ids() if state is not None else ())}
    return {token for token in tokens if 0 <= token < vocab_size}


def _masks(
    rows: list[SamplingRow], states: _States, banned: list[set[int]], vocab_size: int, ends: dict[int, RowEnd]
) -> _Arrays:
    """The masks of all rows, if one of them has any. Adds to ``ends``."""
    masked = [index for index, state in enumerate(states) if state is not None and state.has_mask]
    if not masked:
        return {}
    words = np.full((len(rows), -(-vocab_size // 32)), -1, np.int32)
    for index in masked:
        state = states[index]
        if state is not None and index not in ends:
            end = state.fill_allowed(words[index], rows[index].position, banned[index], vocab_size)
            if end is not None:
                ends[index] = end
                words[index] = -1
    return {"allowed": words.reshape(-1)}


def _penalties(states: _States) -> _Arrays:
    penalised = {index: state for index, state in enumerate(states) if state is not None and state.seen is not None}
    if not penalised:
        return {}
    seen = [state.seen if state is not None else None for state in states]
    strengths = np.zeros((3, len(states)), np.float32)
    strengths[0] = 1.0
    for index, state in penalised.items():
        wanted = state.wishes.sampling
        strengths[:, index] = wanted.repetition_penalty, wanted.frequency_penalty, wanted.presence_penalty
    repetition, frequency, presence = strengths.view(np.int32)
    return _runs("seen", [_NONE if tokens is None else tokens.tokens for tokens in seen]) | {
        "counts": np.concatenate([_NONE if tokens is None else tokens.counts for tokens in seen]),
        "repetition": repetition,
        "frequency": frequency,
        "presence": presence,
    }


def _bias(states: _States, vocab_size: int) -> _Arrays:
    biases = [None if state is None else state.wishes.bias(vocab_size) for state in states]
    runs = _runs("bias", [_NONE if bias is None else bias[0] for bias in biases])
    if runs:
        runs["bias values"] = np.concatenate([_NONE if bias is None else bias[1].view(np.int32) for bias in biases])
    return runs


def _runs(name: str, tokens: Iterable[Int32Array]) -> _Arrays:
    """Nothing where no row has any."""
    tokens = list(tokens)
    starts = np.cumsum([0, *map(len, tokens)], dtype=np.int32)
    return {name: np.concatenate(tokens), f"{name} starts": starts} if starts[-1] else {}


def _token_runs(tensors: dict[str, Tensor], name: str) -> TokenRuns | None:
    return TokenRuns(tensors[name], tensors[f"{name} starts"]) if name in tensors else None


def _penalties_of(tensors: dict[str, Tensor]) -> Penalties | None:
    seen = _token_runs(tensors, "seen")
    if seen is None:  # nothing was drawn yet: there is nothing to penalise
        return None
    strengths = (tensors[name].view(torch.float32) for name in ("repetition", "frequency", "presence"))
    return Penalties(seen, tensors["counts"], *strengths)


def _bias_of(tensors: dict[str, Tensor]) -> LogitBias | None:
    runs = _token_runs(tensors, "bias")
    return None if runs is None else LogitBias(runs, tensors["bias values"].view(torch.float32))
