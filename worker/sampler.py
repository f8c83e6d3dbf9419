"""Turns the logits of a step into tokens: what each row wants, as the arrays that the sampling kernel takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.backend import Kernels
from .candidates import likeliest
from .sampling_row import Candidate, SamplingRow


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the rows of a step gave; see ``StepResult``."""

    token_ids: Tensor
    """int64 [R], on the device of the logits."""
    candidates: Mapping[int, tuple[Candidate, ...]]


@torch.inference_mode()
def sample_rows(logits: Tensor, rows: list[SamplingRow], kernels: Kernels) -> Sampled:
    """A token, or candidates, for each row of ``logits`` [R, vocabulary] float32; the drawn rows may be changed.

    A draw depends on the row's logits, seed, branch and position alone; batch mates do not matter. Raises ValueError
    when a row that wants candidates has no token left to choose from.
    """
    wanting = [index for index, row in enumerate(rows) if row.num_candidates]
    if not wanting:
        return Sampled(_draw(logits, rows, kernels), {})
    candidates = dict(zip(wanting, _candidates(_pick(logits, wanting), [rows[i] for i in wanting]), strict=True))
    token_ids = _tensor([candidates[i][0][0] if i in candidates else 0 for i in range(len(rows))], np.int64, logits)
    drawn = [index for index in range(len(rows)) if index not in candidates]
    if drawn:
        places = _tensor(drawn, np.int64, logits)
        token_ids[places] = _draw(logits.index_select(0, places), [rows[i] for i in drawn], kernels)
    return Sampled(token_ids, candidates)


def _draw(logits: Tensor, rows: list[SamplingRow], kernels: Kernels) -> Tensor:
    """int64 [R]: one token for each row."""
    _ban(logits, rows)
    if all(row.temperature == 0.0 for row in rows):
        return logits.argmax(dim=-1)
    vocab_size = logits.shape[-1]
    return kernels.sample(
        logits,
        _tensor([row.temperature for row in rows], np.float32, logits),
        _tensor([min(row.top_k or vocab_size, vocab_size) for row in rows], np.int32, logits),
        _tensor([row.top_p for row in rows], np.float32, logits),
        _tensor([row.seed for row in rows], np.uint64, logits).view(torch.int64),
        _tensor([row.branch for row in rows], np.int32, logits),
        _tensor([row.position for row in rows], np.int32, logits),
    )


def _candidates(logits: Tensor, rows: list[SamplingRow]) -> list[tuple[Candidate, ...]]:
    """Log-probabilities are taken before anything is banned."""
    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    _ban(log_probs, rows)
    found = likeliest(log_probs, [row.num_candidates for row in rows])
    if not all(found):
        raise ValueError("no token is left to choose candidates from")
    return found


def _ban(scores: Tensor, rows: list[SamplingRow]) -> None:
    """Set what the rows ban to -inf. Ids beyond the vocabulary cannot be drawn anyway."""
    vocab_size = scores.shape[-1]
    banned = [(index, t) for index, row in enumerate(rows) for t in row.banned_token_ids if 0 <= t < vocab_size]
    if banned:
        index, token = _tensor(banned, np.int64, scores).unbind(dim=1)
        scores[index, token] = float("-inf")


def _pick(logits: Tensor, indices: list[int]) -> Tensor:
    """These rows; not copied when it is all of them."""
    return logits if len(indices) == len(logits) else logits.index_select(0, _tensor(indices, np.int64, logits))


def _tensor(values: list[int] | list[float] | list[tuple[int, int]], dtype: type[np.generic], like: Tensor) -> Tensor:
    """On the device of ``like``."""
    return torch.from_numpy(np.array(values, dtype)).to(like.device)
