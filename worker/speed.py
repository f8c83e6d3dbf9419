"""SpeedMeter: how fast this group prefills and decodes, learned from its own steps.

A step is taken to cost what its decodes alone would, plus a time for each further token, which grows with the tokens
before it: attention reads them all. All means are exponentially weighted.
"""

from __future__ import annotations

import math
from bisect import bisect_left

LEAST_MEASURED_TOKENS = 16
"""Fewer tokens of prefill say more about the cost of a step than about the rate of prefill."""

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0
"""Nobody is told to come back sooner or later than this."""

_WEIGHT = 0.2
"""Of a new measurement in a running mean of decodes: about the last five steps count."""

_DECAY = 0.9
"""What a step with prefill counts beside the next one: about the last ten steps count."""

_MOST_OVER_EXPECTED = 3.0
"""Prefill that took longer than so many times what was expected counts as that: rather another process had the
processor for a moment. Where it stays slow, the expectation follows within a few steps."""

_TELLING_SPREAD = 768.0
"""Where the contexts of the last steps lie so far apart (their standard deviation, in tokens), what they say of the
slope counts a quarter; with less, soon nothing."""

_LEAST_CONSTANT_SHARE = 0.1
"""Of the cost of a mean token, does not depend on its context at the least: else a new prompt would seem to be free."""

_LEAST_PREFILL_SHARE = 0.05
"""Of a step, is prefill's share at the least: what is left when the decodes are subtracted may be all noise."""


class SpeedMeter:
    def __init__(self) -> None:
        self.decode_step_s = 0.0
        """Mean time of the last steps that only decoded; 0.0 until there was one."""
        self._decodes = _DecodeCurve()
        self._guessed_decode_s: float | None = None
        """What the first step that did both took beyond its prefill; it serves until a step only decodes."""
        self._prefill = _PrefillCost()

    @property
    def prefill_tokens_per_s(self) -> float:
        """Mean of the last steps, whatever the context of their prompts; 0.0 until measured."""
        return 1.0 / self._prefill.mean_s if self._prefill else 0.0

    @property
    def prefill_context(self) -> float:
        """Tokens before a token of prefill, mean of the last steps."""
        return self._prefill.mean_context

    @property
    def prefill_context_s(self) -> float:
        """Time that a token of prefill takes longer for each token before it."""
        return self._prefill.slope_s

    @property
    def knows_both(self) -> bool:
        """Whether there is an estimate both of the cost of prefill and of the time of decodes."""
        return bool(self._prefill) and (bool(self._decodes) or self._guessed_decode_s is not None)

    def note(self, num_prefill_tokens: int, num_decoded: int, duration_s: float, prefill_context: float = 0.0) -> None:
        """A step that computed ``num_prefill_tokens`` beside one token each of ``num_decoded`` sequences.

        ``prefill_context``: tokens before a token of prefill, mean over those of the step.
        """
        if duration_s <= 0.0 or num_prefill_tokens + num_decoded == 0:
            return
        if num_prefill_tokens == 0:
            self.decode_step_s = _blend(self.decode_step_s, duration_s, _WEIGHT) if self._decodes else duration_s
            self._decodes.note(num_decoded, duration_s)
        elif num_prefill_tokens >= LEAST_MEASURED_TOKENS:
            self._note_prefill(num_prefill_tokens, num_decoded, duration_s, prefill_context)

    def retry_after_s(self, num_tokens: int) -> float:
        """When it is worth to come back, with so many tokens waiting: between one second and a minute."""
        rate = self.prefill_tokens_per_s
        return min(max(num_tokens / rate if rate else 0.0, LEAST_RETRY_S), MOST_RETRY_S)

    def expected_step_s(self, num_prefill_tokens: int, num_decoded: int, prefill_context: float = 0.0) -> float:
        """Time that such a step will take; 0.0 while a part of it is unknown. Arguments as for ``note``."""
        decode_s, prefill_s = self._decode_s(num_decoded), 0.0
        if num_prefill_tokens:
            if not self._prefill or (num_decoded and not self.knows_both):
                return 0.0
            prefill_s = num_prefill_tokens * self._prefill.token_s(prefill_context)
        return decode_s + prefill_s

    def num_prefill_tokens_in(self, time_s: float, num_context_tokens: int) -> int:
        """Tokens of a prompt that are computed in ``time_s`` where ``num_context_tokens`` are before the first of them;
        0 until measured."""
        return self._prefill.num_tokens_in(time_s, num_context_tokens) if self._prefill and time_s > 0.0 else 0

    def _decode_s(self, num_decoded: int) -> float:
        if num_decoded == 0:
            return 0.0
        return self._decodes.expected_s(num_decoded) if self._decodes else self._guessed_decode_s or 0.0

    def _note_prefill(self, num_tokens: int, num_decoded: int, duration_s: float, context: float) -> None:
        if num_decoded and self._prefill and not self.knows_both:
            self._guessed_decode_s = max(duration_s - num_tokens * self._prefill.token_s(context), 0.0)
        prefill_s = max(duration_s - self._decode_s(num_decoded), _LEAST_PREFILL_SHARE * duration_s)
        self._prefill.note(num_tokens, context, prefill_s)


class _PrefillCost:
    """Time of a token of prefill with c tokens before it, as a + b * c with a > 0, b ≥ 0.

    Recursive least squares with exponential forgetting (Ljung and Söderström, "Theory and Practice of Recursive
    Identification", 1983), each step with the weight of its tokens: the line goes through the mean of the last steps,
    and what a step took beyond the line turns it. As far as contexts do not differ, it is not turned, but keeps its
    shape and moves up and down with the speed of the machine: the steps of one prompt lie close together, those of
    short prompts too, and a line through their noise would say anything about other contexts.

    The variance is that of Finch, "Incremental calculation of weighted mean and variance" (2009).
    """

    def __init__(self) -> None:
        self.mean_s = 0.0
        """Of a token, whatever its context."""
        self._mean_context = 0.0
        self._variance = 0.0
        """Of context."""
        self._weight = 0.0
        self._slope = 0.0

    def __bool__(self) -> bool:
        return self._weight > 0.0

    def note(self, num_tokens: int, context: float, duration_s: float) -> None:
        cost_s = duration_s / num_tokens
        if not self:
            self._weight, self._mean_context, self.mean_s = num_tokens, context, cost_s
            return
        self._weight = _DECAY * self._weight + num_tokens
        gain = num_tokens / self._weight
        expected_s, further = self.token_s(context), context - self._mean_context
        cost_s = min(cost_s, _MOST_OVER_EXPECTED * expected_s)
        slope = self._slope + self._turn(gain, further, cost_s - expected_s)
        self._mean_context += gain * further
        carried_s = self.mean_s + gain * further * self._slope
        self.mean_s += gain * (cost_s - self.mean_s)
        self._slope = min(max(slope * self.mean_s / carried_s, 0.0), self._steepest)

    def _turn(self, gain: float, further: float, over_s: float) -> float:
        """What a step adds to the slope that has ``further`` context than the mean and took ``over_s`` too long."""
        variance = self._variance + gain * further * further
        self._variance = (1.0 - gain) * variance
        trust = (variance / (variance + _TELLING_SPREAD * _TELLING_SPREAD)) ** 2
        return trust * gain * further * over_s / variance if variance else 0.0

    @property
    def mean_context(self) -> float:
        return self._mean_context

    @property
    def slope_s(self) -> float:
        return self._slope

    @property
    def _steepest(self) -> float:
        most_s = (1.0 - _LEAST_CONSTANT_SHARE) * self.mean_s
        return most_s / self._mean_context if self._mean_context else 0.0

    def token_s(self, context: float) -> float:
        return self.mean_s + self._slope * (context - self._mean_context)

    def num_tokens_in(self, time_s: float, num_context_tokens: int) -> int:
        """n with n * (a + b * (num_context_tokens + n / 2)) = time_s, rounded down."""
        first_s = self.token_s(num_context_tokens)
        return int(2.0 * time_s / (first_s + math.sqrt(first_s * first_s + 2.0 * self._slope * time_s)))


class _DecodeCurve:
    """Time of a step that decodes n sequences, as a + b * n piece by piece: a mean point for each power of two."""

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}
        """Bit length of n → mean n, mean time."""

    def __bool__(self) -> bool:
        return bool(self._points)

    def note(self, num_sequences: int, duration_s: float) -> None:
        octave = num_sequences.bit_length()
        mean, mean_s = self._points.get(octave, (num_sequences, duration_s))
        self._points[octave] = _blend(mean, num_sequences, _WEIGHT), _blend(mean_s, duration_s, _WEIGHT)

    def expected_s(self, num_sequences: int) -> float:
        """There is a point, and ``num_sequences`` is ≥ 1."""
        points = sorted(self._points.values())
        right = min(max(bisect_left(points, (num_sequences, 0.0)), 1), len(points) - 1)
        return _on_line(points[max(right - 1, 0)], points[right], num_sequences)


def _on_line(left: tuple[float, float], right: tuple[float, float], at: float) -> float:
    """On the line through two points (n, seconds), which may be one; a and b of the nearer one's line stay ≥ 0."""
    near, near_s = min(left, right, key=lambda point: abs(point[0] - at))
    slope = (right[1] - left[1]) / (right[0] - left[0]) if right[0] > left[0] else 0.0
    slope = min(max(slope, 0.0), near_s / near)
    return near_s + slope * (at - near)


def _blend(mean: float, value: float, weight: float) -> float:
    return mean + weight * (value - mean)
