"""What ``Kernels.sample`` takes and gives: a tensor for each parameter, with an entry for each row of logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

GREEDY_TEMPERATURE = 1e-4
"""At most this is 0: what it would draw is the best token, or one as good but for the rounding of logits."""


@dataclass(frozen=True)
class TokenRuns:
    """A set of tokens for each row, one row's after the other's; no token twice in a row's."""

    tokens: Tensor
    """int32 ``[N]``, each below the vocabulary's size."""
    starts: Tensor
    """int32 ``[R + 1]``: row r has ``tokens[starts[r] : starts[r + 1]]``, often none."""


@dataclass(frozen=True)
class Penalties:
    """What lowers the logits of tokens that were there before.

    A token of the prompt or the output has its logit divided by ``repetition`` if positive, else multiplied (Keskar et
    al. 2019, CTRL); then ``count * frequency`` is subtracted, and ``presence`` where the count is not 0 (OpenAI).
    """

    seen: TokenRuns
    """The distinct tokens of prompt and output."""
    counts: Tensor
    """int32 ``[N]``: how often in the output; 0: in the prompt only."""
    repetition: Tensor
    """float32 ``[R]``; 1.0: off."""
    frequency: Tensor
    """float32 ``[R]``; 0.0: off."""
    presence: Tensor
    """float32 ``[R]``; 0.0: off."""


@dataclass(frozen=True)
class LogitBias:
    """What is added to logits after the penalties (so that it shifts by exactly itself), before anything is banned."""

    runs: TokenRuns
    values: Tensor
    """float32 ``[N]``, finite."""


@dataclass(frozen=True)
class SamplingTensors:
    """All ``[R]`` and, as what is in them, contiguous."""

    temperature: Tensor
    """float32; 0.0, and up to GREEDY_TEMPERATURE: the best token, the lowest id of equals."""
    top_k: Tensor
    """int32; the vocabulary's size: off."""
    top_p: Tensor
    """float32; 1.0: off."""
    min_p: Tensor
    """float32; 0.0: off."""
    seeds: Tensor
    """int64: bit pattern of the unsigned seed."""
    branches: Tensor
    """int32."""
    positions: Tensor
    """int32: output tokens before this one."""
    filters: bool = True
    """False: no row has top_k, top_p or min_p. Known to the host, which need not ask the device."""
    banned: TokenRuns | None = None
    """These cannot be drawn."""
    penalties: Penalties | None = None
    bias: LogitBias | None = None
    allowed: Tensor | None = None
    """int32 ``[R, ceil(vocabulary / 32)]``: bit t % 32 of word t // 32 is set where token t can be drawn; rows that
    allow everything have all bits set."""

    @property
    def edits(self) -> bool:
        """Whether logits are changed ahead of the temperature."""
        return any(each is not None for each in (self.banned, self.penalties, self.bias, self.allowed))


@dataclass(frozen=True)
class Logprobs:
    """Of each row of logits, in its log-softmax. A row without one (NaN is in it, or the largest logit is not finite)
    has NaN, rank 0 and id -1."""

    logprobs: Tensor
    """float32 ``[R]``: of the token asked for; NaN where there is none."""
    ranks: Tensor
    """int32 ``[R]``: 1 for the largest logit: how many are larger, and one; 0 where there is none."""
    top_token_ids: Tensor
    """int32 ``[R, k]``: the likeliest, largest first, of equal logits the lowest id first."""
    top_logprobs: Tensor
    """float32 ``[R, k]``; -inf where the logit is."""
