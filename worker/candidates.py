"""The likeliest tokens of rows of logits: what a beam search chooses from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .sampling_row import Candidate


def likeliest(log_probs: Tensor, counts: list[int]) -> list[tuple[Candidate, ...]]:
    """For each row of ``log_probs`` [B, vocabulary] its ``counts[b]`` ≥ 1 largest, largest first; of equals the lowest
    id. Fewer where the rest has no probability; none where it is not a number.

    One ``topk`` for all rows, which picks any of equals: it is asked for one token more than wanted, and a row whose
    last wanted token equals the first that is not is put in order as a whole.
    """
    vocab_size = log_probs.shape[-1]
    values, token_ids = log_probs.topk(min(max(counts) + 1, vocab_size), dim=-1)
    found = []
    for index, (row, ids, count) in enumerate(zip(values.tolist(), token_ids.tolist(), counts, strict=True)):
        if count < len(row) and -math.inf < row[count] == row[count - 1]:
            row, ids = _in_order(log_probs[index], count)
        pairs = [pair for pair in zip(ids, row, strict=True) if pair[1] > -math.inf]
        found.append(tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]))
    return found


def _in_order(log_probs: Tensor, count: int) -> tuple[list[float], list[int]]:
    """The ``count`` largest of [vocabulary] and their ids; of equals those with the lowest ids."""
    ordered = torch.sort(log_probs, descending=True, stable=True)
    return ordered.values[:count].tolist(), ordered.indices[:count].tolist()
