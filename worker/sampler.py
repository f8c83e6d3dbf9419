"""Turns the logits of a step into tokens: what each row wants, as the arrays that the sampling kernel takes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..kernels.backend import Kernels
from .sampling_row import SamplingRow


@torch.inference_mode()
def sample_rows(logits: Tensor, rows: list[SamplingRow], kernels: Kernels) -> Tensor:
    """int64 [R]: one token id for each row of ``logits`` [R, vocab] float32, which may be changed.

    A draw depends on the row's logits, seed, branch and position alone; batch mates do not matter.
    """
    vocab_size = logits.shape[-1]
    for index, row in enumerate(rows):
        if row.banned_token_ids:
            banned = [
                token for token in row.banned_token_ids if 0 <= token < vocab_size
            ]  # others cannot be drawn anyway
            logits[index, banned] = float("-inf")
    if all(row.temperature == 0.0 for row in rows):
        return logits.argmax(dim=-1)
    device = logits.device
    return kernels.sample(
        logits,
        _tensor([row.temperature for row in rows], np.float32, device),
        _tensor([min(row.top_k or vocab_size, vocab_size) for row in rows], np.int32, device),
        _tensor([row.top_p for row in rows], np.float32, device),
        _tensor([row.seed for row in rows], np.uint64, device).view(torch.int64),
        _tensor([row.branch for row in rows], np.int32, device),
        _tensor([row.position for row in rows], np.int32, device),
    )


def _tensor(values: list[int] | list[float], dtype: type[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values, dtype)).to(device)
