"""LiveRequest: a request under way and the sequences that are left of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .beam_run import BeamRun
from .messages import Pooling, Request, RequestProgress
from .sampling_state import SamplingState
from .sequence import Sequence


@dataclass(slots=True)
class LiveRequest:
    request: Request
    received_s: float
    """On the engine's clock."""
    sequences: list[Sequence]
    """Those that have not ended; of a beam search, its beams."""
    states: Mapping[int, SamplingState] = field(default_factory=dict)
    """Of its branches, if they have any. From the first row on they belong to the executor."""
    search: BeamRun | None = None
    num_cached_tokens: int | None = None
    """Of the first branch that was computed; None until its prompt is."""
    admitted_s: float | None = None
    """When the first step that computes a part of it was planned, on the engine's clock."""
    ttft_s: float = 0.0
    """From its receipt to its first token; 0.0 before that."""
    phases: tuple[float, float] | None = None
    """What an update has to tell of them; see ``SequenceUpdate.phases``."""
    num_output_tokens: int = 0
    """Of the branches that have ended."""
    hidden_sum: NDArray[np.float64] | None = None
    """Of the tokens pooled so far, ``[hidden]``."""

    def add_hidden(self, hidden: NDArray[np.float32]) -> None:
        """The sum of the last hidden states of some more tokens, ``[hidden]``."""
        so_far = np.zeros(hidden.size) if self.hidden_sum is None else self.hidden_sum
        self.hidden_sum = so_far + hidden

    def embedding(self) -> NDArray[np.float32]:
        """Little endian ``[hidden]``, once all tokens are pooled that are to be."""
        if self.hidden_sum is None:
            raise RuntimeError(f"nothing of {self.request.request_id} was pooled")
        count = len(self.request.prompt_token_ids) if self.request.pooling is Pooling.MEAN else 1
        return (self.hidden_sum / count).astype("<f4")

    def progress(self, *, finished: bool = False) -> RequestProgress:
        return RequestProgress(
            self.request.request_id,
            prefilled=self.num_cached_tokens is not None,
            finished=finished,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_output_tokens=self.num_output_tokens if finished else 0,
            ttft_s=self.ttft_s,
            tenant=self.request.tenant,
        )
