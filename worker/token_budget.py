"""TokenBudget: how many tokens of prompts a step computes beside the sequences that decode."""

from __future__ import annotations

from typing import Protocol

from .errors import ConfigurationError
from .speed import LEAST_MEASURED_TOKENS, SpeedMeter

_SAFETY = 0.9
"""Share of the target that is planned for; the rest is for what varies from step to step."""

_FIRST_PREFILL_TOKENS = 64
"""Beside running decodes while no speed is known: short on any machine, and long enough to be measured."""


class TokenBudget(Protocol):
    def num_prefill_tokens(self, num_decodes: int, num_context_tokens: int) -> int:
        """Tokens, ≥ 0, that the next step may compute beside one each of ``num_decodes`` sequences.

        ``num_context_tokens`` come before the first of them: what is computed of the prompt that comes first; 0 when
        that is not known.
        """
        ...


class FixedBudget:
    """A step has at most ``max_num_batched_tokens``; decodes go first."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._most = max_num_batched_tokens

    def num_prefill_tokens(self, num_decodes: int, num_context_tokens: int) -> int:
        return max(self._most - num_decodes, 0)


class LatencyBudget:
    """As many as keep the step within ``target_itl_s``: no stream pauses longer because somebody's prompt is computed.

    Time of the decodes alone and cost of prefill are measured (``speed``), so the budget follows model, machine, batch
    and the context of the prompt. Where it would be less than ``least`` tokens, or than can be measured, prefill goes
    on with so many and steps take longer than the target: less would save little of a step and make a prompt wait for
    ever. A step without decodes keeps nobody waiting and has ``max_num_batched_tokens``.

    Raises ConfigurationError when ``target_itl_s`` is not above 0.
    """

    def __init__(self, max_num_batched_tokens: int, target_itl_s: float, speed: SpeedMeter, *, least: int) -> None:
        if not target_itl_s > 0.0:
            raise ConfigurationError(f"target_itl_s is {target_itl_s}; it must be above 0 seconds")
        self._fixed = FixedBudget(max_num_batched_tokens)
        self._planned_s = _SAFETY * target_itl_s
        self._speed = speed
        self._least = max(least, LEAST_MEASURED_TOKENS)

    def num_prefill_tokens(self, num_decodes: int, num_context_tokens: int) -> int:
        rest = self._fixed.num_prefill_tokens(num_decodes, num_context_tokens)
        if num_decodes == 0:
            return rest
        return min(rest, max(self._least, self._num_fitting(num_decodes, num_context_tokens)))

    def _num_fitting(self, num_decodes: int, num_context_tokens: int) -> int:
        speed = self._speed
        if not speed.knows_both:
            return _FIRST_PREFILL_TOKENS
        prefill_s = self._planned_s - speed.expected_step_s(0, num_decodes)
        return speed.num_prefill_tokens_in(prefill_s, num_context_tokens)
