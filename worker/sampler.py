"""Turns the logits of a step into tokens: what each row wants, as the arrays that the sampling kernel takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.backend import Kernels
from ..kernels.sampling import SamplingTensors, TokenRuns
from .candidates import likeliest
from .sampling_row import Candidate, SamplingRow


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the rows of a step gave; see ``StepResult``."""

    token_ids: Tensor
    """int64 [R], on the device of the logits; -1 where they give none: NaN is among them, or none is finite."""
    candidates: Mapping[int, tuple[Candidate, ...]]
    """Of each row that wants them; none where there is no token."""


@torch.inference_mode()
def sample_rows(logits: Tensor, rows: list[SamplingRow], kernels: Kernels) -> Sampled:
    """A token, or candidates, for each row of ``logits`` [R, vocabulary] float32.

    A draw depends on the row's logits, seed, branch and position alone; batch mates do not matter. Raises what a row's
    parameters raise that are no numbers of their types, as a seed of more than 64 bits.
    """
    wanting = [index for index, row in enumerate(rows) if row.num_candidates]
    if not wanting:
        return Sampled(_draw(logits, rows, kernels), {})
    candidates = dict(zip(wanting, _candidates(_pick(logits, wanting), [rows[i] for i in wanting]), strict=True))
    likeliest_ids = [candidates[i][0][0] if candidates.get(i) else -1 for i in range(len(rows))]
    token_ids = _tensor(likeliest_ids, np.int64, logits)
    drawn = [index for index in range(len(rows)) if index not in candidates]
    if drawn:
        places = _tensor(drawn, np.int64, logits)
        token_ids[places] = _draw(logits.index_select(0, places), [rows[i] for i in drawn], kernels)
    return Sampled(token_ids, candidates)


def _draw(logits: Tensor, rows: list[SamplingRow], kernels: Kernels) -> Tensor:
    """int64 [R]: one token for each row, or -1."""
    return kernels.sample(logits, _sampling_tensors(logits, rows)).token_ids


def _sampling_tensors(logits: Tensor, rows: list[SamplingRow]) -> SamplingTensors:
    """On the device, by one copy that nobody waits for. Each tensor begins at a multiple of 16 bytes, as kernels are
    compiled for: other addresses would be other kernels."""
    vocab_size, num_rows = logits.shape[-1], len(rows)
    packed = np.zeros((8, -(-num_rows // 4) * 4), np.int32)
    packed[:2].reshape(-1).view(np.uint64)[:num_rows] = np.array([row.seed for row in rows], np.uint64)
    packed[2:5].view(np.float32)[:, :num_rows] = [
        [r.temperature for r in rows],
        [r.top_p for r in rows],
        [r.min_p for r in rows],
    ]
    packed[5, :num_rows] = [min(row.top_k or vocab_size, vocab_size) for row in rows]
    packed[6:, :num_rows] = [[row.branch for row in rows], [row.position for row in rows]]
    words = _upload(packed, logits)
    top_k, branches, positions = words[5:, :num_rows]
    temperature, top_p, min_p = words[2:5].view(torch.float32)[:, :num_rows]
    return SamplingTensors(
        temperature,
        top_k,
        top_p,
        min_p,
        words[:2].view(-1).view(torch.int64)[:num_rows],
        branches,
        positions,
        filters=any(_filters(row) for row in rows),
        banned=_banned(logits, rows),
    )


def _filters(row: SamplingRow) -> bool:
    return row.temperature > 0.0 and (row.top_k is not None or row.top_p < 1.0 or row.min_p > 0.0)


def _banned(logits: Tensor, rows: list[SamplingRow]) -> TokenRuns | None:
    """Ids beyond the vocabulary cannot be drawn anyway."""
    runs = [sorted({t for t in row.banned_token_ids if 0 <= t < logits.shape[-1]}) for row in rows]
    if not any(runs):
        return None
    starts = np.cumsum([0, *map(len, runs)], dtype=np.int32)
    tokens = np.array([token for run in runs for token in run], np.int32)
    return TokenRuns(_upload(tokens, logits), _upload(starts, logits))


def _candidates(logits: Tensor, rows: list[SamplingRow]) -> list[tuple[Candidate, ...]]:
    """Log-probabilities are taken before anything is banned."""
    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    _ban(log_probs, rows)
    return likeliest(log_probs, [row.num_candidates for row in rows])


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
    return _upload(np.array(values, dtype), like)


def _upload(array: NDArray[np.generic], like: Tensor) -> Tensor:
    """On the device of ``like``, which is not waited for."""
    tensor = torch.from_numpy(array)
    return tensor if like.is_cpu else tensor.pin_memory().to(like.device, non_blocking=True)
