"""LiveRequest: a request under way and the sequences that are left of it."""

from __future__ import annotations

from dataclasses import dataclass

from .beam_run import BeamRun
from .messages import Request, RequestProgress
from .sequence import Sequence


@dataclass(slots=True)
class LiveRequest:
    request: Request
    received_s: float
    """On the engine's clock."""
    sequences: list[Sequence]
    """Those that have not ended; of a beam search, its beams."""
    search: BeamRun | None = None
    num_cached_tokens: int | None = None
    """Of the first branch that was computed; None until its prompt is."""
    ttft_s: float = 0.0
    """From its receipt to its first token; 0.0 before that."""
    num_output_tokens: int = 0
    """Of the branches that have ended."""

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
