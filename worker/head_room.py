"""HeadRoom: how much of the KV pool must stay free for the growth of the sequences that run."""

from __future__ import annotations

import math

_MEMORY = 256
"""Finished sequences that the means look back on: enough for a second moment, few enough to follow a change of load."""


class HeadRoom:
    """Learned from how long sequences really get.

    How much longer will a running sequence get? With L the output tokens of a sequence, the one that is found running
    at a random moment has a mean residual life of

        m = E[L²] / (2 * E[L])        steps of one token (renewal theory, the inspection paradox)

    which is more than E[L] / 2, since a long one is more likely to be met. Let N sequences run, that hold c tokens each
    in the mean, and let their ends come as a Poisson process would have them. After t steps N * e^(-t/m) are left, each
    with c + t tokens:

        use(t) = N * e^(-t/m) * (c + t),        use'(t) = 0 at t = m - c

    If c ≥ m, use only falls: for each token gained, more is given back by those that end. Otherwise the peak is
    N * m * e^(c/m - 1), and N * (m * e^(c/m - 1) - c) above what is held now.

    That is a mean; on top comes a margin for chance, which grows like the standard deviation of how many of N have
    ended by some time: √N blocks.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_finished = 0
        self._mean = 0.0
        self._mean_square = 0.0

    def note_finished(self, num_output_tokens: int) -> None:
        """A sequence ended by itself, not by an abort, with so many output tokens."""
        self._num_finished = min(self._num_finished + 1, _MEMORY)
        weight = 1.0 / self._num_finished
        self._mean += weight * (num_output_tokens - self._mean)
        self._mean_square += weight * (num_output_tokens**2 - self._mean_square)

    @property
    def mean_residual_tokens(self) -> float:
        """m; 0.0 while nothing is known."""
        return self._mean_square / (2.0 * self._mean) if self._mean > 0.0 else 0.0

    def tokens(self, num_running: int, num_held_tokens: int, num_tokens_to_come: int) -> int:
        """What the use of ``num_running`` sequences, which hold ``num_held_tokens`` together, will grow by at its peak.

        Not more than ``num_tokens_to_come``, what all of them may get. While nothing is known, the margin alone.
        """
        if num_running == 0:
            return 0
        margin = math.sqrt(num_running) * self._block_size
        growth = num_running * self._peak_growth(num_held_tokens / num_running)
        return math.ceil(min(growth, num_tokens_to_come) + margin)

    def _peak_growth(self, num_held: float) -> float:
        """Of a sequence, in tokens, when each holds ``num_held``."""
        residual = self.mean_residual_tokens
        if num_held >= residual:
            return 0.0
        return residual * math.exp(num_held / residual - 1.0) - num_held
