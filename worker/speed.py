"""SpeedMeter: how fast this group prefills and decodes, learned from its own steps."""

from __future__ import annotations

_WEIGHT = 0.2
"""Of a new measurement in the running mean: about the last five steps count."""

_LEAST_PREFILL_TOKENS = 16
"""Fewer say more about the cost of a step than about the rate of prefill."""


class SpeedMeter:
    """Exponentially weighted means; 0.0 until something was measured."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.decode_step_s = 0.0

    def note(self, num_prefill_tokens: int, num_decoded: int, duration_s: float) -> None:
        """A step that computed ``num_prefill_tokens`` beside ``num_decoded`` sampled tokens took ``duration_s``."""
        if duration_s <= 0.0:
            return
        if num_prefill_tokens == 0:
            self.decode_step_s = _blend(self.decode_step_s, duration_s)
        elif num_prefill_tokens >= _LEAST_PREFILL_TOKENS:
            # What the step would have taken for its decodes alone is not prefill's share, but at most half of it.
            decode_s = min(self.decode_step_s if num_decoded > 1 else 0.0, duration_s / 2)
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, num_prefill_tokens / (duration_s - decode_s))


def _blend(mean: float, value: float) -> float:
    return value if mean == 0.0 else mean + _WEIGHT * (value - mean)
