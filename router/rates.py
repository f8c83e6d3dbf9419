"""Small online estimators. Each begins with a prior that a few measurements outweigh, and forgets old measurements."""

from __future__ import annotations

import math


class Mean:
    """Mean of recent observations; ``memory`` of them count, and the prior counts as ``prior_weight`` more."""

    def __init__(self, prior: float, *, prior_weight: float = 4.0, memory: float = 200.0) -> None:
        self._prior_weight = prior_weight
        self._keep = 1.0 - 1.0 / memory
        self._weight = prior_weight
        self._sum = prior_weight * prior

    def add(self, value: float) -> None:
        self._weight = self._weight * self._keep + 1.0
        self._sum = self._sum * self._keep + value

    @property
    def is_measured(self) -> bool:
        """Whether there is a value: an observation, or a prior that counts."""
        return self._weight > 0

    @property
    def value(self) -> float:
        return self._sum / self._weight


class DecayedRate:
    """Amount per second over about the last ``horizon_s``: each amount fades with e^(-age / horizon)."""

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self.sum = 0.0
        """What is left of all amounts at the time of the last one."""
        self.at_s = 0.0
        """Of the last amount."""

    def add(self, amount: float, now: float) -> None:
        self.sum = self._faded(now) + amount
        self.at_s = now

    def latest_per_s(self) -> float:
        """At the time of the last amount."""
        return self.per_s(self.at_s)

    def per_s(self, now: float) -> float:
        return self._faded(now) / self._horizon_s

    def _faded(self, now: float) -> float:
        return self.sum * math.exp(-max(0.0, now - self.at_s) / self._horizon_s)


class DecodeModel:
    """Time of a decode step as a line over the number of sequences: step = base + slope * n, learned online.

    Least squares with exponential forgetting. Until n has varied, the slope is near ``PRIOR_SHARE`` of the mean step:
    a step that reads all weights costs little more for one sequence more.
    """

    PRIOR_SHARE = 0.02
    _PRIOR_VARIANCE = 1.0
    """Variance of n at which measurement and prior weigh the same."""

    def __init__(self, *, memory: float = 200.0) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._weight = 0.0
        self._mean_n = self._mean_step = self._covariance = self._variance = 0.0

    def add(self, num_sequences: int, step_s: float) -> None:
        self._weight = self._weight * self._keep + 1.0
        gain = 1.0 / self._weight
        delta_n, delta_step = num_sequences - self._mean_n, step_s - self._mean_step
        self._mean_n += gain * delta_n
        self._mean_step += gain * delta_step
        self._covariance = (1 - gain) * (self._covariance + gain * delta_n * delta_step)
        self._variance = (1 - gain) * (self._variance + gain * delta_n * delta_n)

    @property
    def is_measured(self) -> bool:
        return self._weight > 0

    @property
    def slope_s(self) -> float:
        """Seconds that a step takes longer for one sequence more; not negative."""
        prior = self.PRIOR_SHARE * self._mean_step * self._PRIOR_VARIANCE
        return max(0.0, (self._covariance + prior) / (self._variance + self._PRIOR_VARIANCE))

    def step_s(self, num_sequences: float) -> float:
        """Estimated time of a step with so many sequences."""
        line = self._mean_step + self.slope_s * (num_sequences - self._mean_n)
        return max(line, 0.1 * self._mean_step)
