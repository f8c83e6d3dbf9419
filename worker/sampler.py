"""Turns the logits of a step into tokens: what each row wants, as the arrays that the sampling kernel takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.backend import Kernels
from ..kernels.sampling import SamplingTensors
from .candidates import likeliest
from .logit_edits import LogitEdits, logit_edits
from .sampling_row import Candidate, SamplingRow
from .sampling_state import RowEnd
from .token_logprobs import RowLogprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the rows of a step gave; see ``StepResult``."""

    token_ids: Tensor
    """int64 [R], on the device of the logits; -1 where they give none: NaN is among them, or none is finite."""
    candidates: Mapping[int, tuple[Candidate, ...]] = field(default_factory=dict)
    """Of each row that wants them; none where there is no token."""
    ends: Mapping[int, RowEnd] = field(default_factory=dict)
    """Rows whose tokens mean nothing."""
    logprobs: tuple[RowLogprobs, ...] = ()
    """Of the rows that want them."""


@torch.inference_mode()
def sample_rows(logits: Tensor, rows: list[SamplingRow], kernels: Kernels) -> Sampled:
    """A token, or candidates, for each row of ``logits`` [R, vocabulary] float32.

    A draw depends on the row's logits, seed, branch, position and state alone; batch mates do not matter. Raises what a
    row's parameters raise that are no numbers of their types, as a seed of more than 64 bits, and RuntimeError for a
    state that is behind.
    """
    wanting = [index for index, row in enumerate(rows) if row.num_candidates]
    sampled = _search(logits, rows, wanting, kernels) if wanting else _draw(logits, rows, kernels)
    return replace(sampled, logprobs=_logprobs(logits, rows, sampled.token_ids, kernels))


def _search(logits: Tensor, rows: list[SamplingRow], wanting: list[int], kernels: Kernels) -> Sampled:
    """Candidates for the rows ``wanting``; a token for each of the others."""
    candidates = dict(zip(wanting, _candidates(_pick(logits, wanting), [rows[i] for i in wanting]), strict=True))
    likeliest_ids = [candidates[i][0][0] if candidates.get(i) else -1 for i in range(len(rows))]
    token_ids = _tensor(likeliest_ids, np.int64, logits)
    others = [index for index in range(len(rows)) if index not in candidates]
    if not others:
        return Sampled(token_ids, candidates)
    drawn = _draw(_pick(logits, others), [rows[i] for i in others], kernels)
    token_ids[_tensor(others, np.int64, logits)] = drawn.token_ids
    return Sampled(token_ids, candidates, {others[at]: end for at, end in drawn.ends.items()})


def _draw(logits: Tensor, rows: list[SamplingRow], kernels: Kernels) -> Sampled:
    """One token for each row, or -1."""
    edits = logit_edits(rows, logits.shape[-1], logits.device)
    return Sampled(kernels.sample(logits, _sampling_tensors(logits, rows, edits)), ends=edits.ends)


def _logprobs(logits: Tensor, rows: list[SamplingRow], token_ids: Tensor, kernels: Kernels) -> tuple[RowLogprobs, ...]:
    wishes = {index: row.num_logprobs for index, row in enumerate(rows) if row.num_logprobs is not None}
    if not wishes:
        return ()
    wanting, counts = list(wishes), list(wishes.values())
    most = min(max(counts), logits.shape[-1])
    found = kernels.logprobs(_pick(logits, wanting), _pick(token_ids, wanting), most)
    return (RowLogprobs(wanting, counts, found),)


def _sampling_tensors(logits: Tensor, rows: list[SamplingRow], edits: LogitEdits) -> SamplingTensors:
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
        banned=edits.banned,
        penalties=edits.penalties,
        bias=edits.bias,
        allowed=edits.allowed,
    )


def _filters(row: SamplingRow) -> bool:
    return row.temperature > 0.0 and (row.top_k is not None or row.top_p < 1.0 or row.min_p > 0.0)


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


def _pick(tensor: Tensor, indices: list[int]) -> Tensor:
    """These rows, in order; not copied when it is all of them."""
    return tensor if len(indices) == len(tensor) else tensor.index_select(0, _tensor(indices, np.int64, tensor))


def _tensor(values: list[int] | list[float] | list[tuple[int, int]], dtype: type[np.generic], like: Tensor) -> Tensor:
    """On the device of ``like``."""
    return _upload(np.array(values, dtype), like)


def _upload(array: NDArray[np.generic], like: Tensor) -> Tensor:
    """On the device of ``like``, which is not waited for."""
    tensor = torch.from_numpy(array)
    return tensor if like.is_cpu else tensor.pin_memory().to(like.device, non_blocking=True)
