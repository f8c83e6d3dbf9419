"""Log-probabilities on their way from the device to the messages that carry them."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.sampling import Logprobs
from .host_copy import HostCopy
from .messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Of some rows of a step."""

    rows: list[int]
    counts: list[int]
    """For each of them, how many of the likeliest tokens are wanted: at most the columns of ``found``."""
    found: Logprobs
    """On the device, a row for each of ``rows``."""


class LogprobsCopy:
    """Behind everything that was launched before it; see ``HostCopy``."""

    def __init__(self, given: RowLogprobs) -> None:
        self._given = given
        found = given.found
        tensors = (found.logprobs, found.ranks, found.top_token_ids, found.top_logprobs)
        self._copies = [HostCopy(tensor) for tensor in tensors]

    def wait(self) -> dict[int, TokenLogprobs]:
        """By row. Of a row that gave no token they mean nothing."""
        logprobs, ranks, top_ids, top_logprobs = (copy.wait().tolist() for copy in self._copies)
        return {
            row: TokenLogprobs(logprobs[at], ranks[at], tuple(top_ids[at][:count]), tuple(top_logprobs[at][:count]))
            for at, (row, count) in enumerate(zip(self._given.rows, self._given.counts, strict=True))
        }
