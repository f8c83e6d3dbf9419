"""What differs between two results beyond noise: ratios with an interval that noise alone leaves in 1 of 100 cases.

With three repeats or more on both sides, noise is the spread over repeats: Welch's interval (Biometrika 34, 1947) for
the difference of the means of logarithms. With fewer it is what varies within the runs (``within_run.py``), which does
not know what changes from run to run: which of the two it was is said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import NormalDist

import numpy as np

from .figures import flat
from .result import Result
from .within_run import relative_errors

_CONFIDENCE = 0.99
_FEWEST_REPEATS = 3
_NUM_DRAWS = 40_000

_TIMES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
_HIGHER_IS_BETTER = {
    "requests_per_s": True,
    "output_tokens_per_s": True,
    "tokens_per_s": True,
    "goodput": True,
    "goodput_per_s": True,
    **{f"{name}.{cut}": False for name in _TIMES for cut in ("mean", "p50", "p90", "p99")},
    "cached_share": True,
    "num_computed_prompt_tokens": False,
    "imbalance": False,
}
COMPARED = tuple(_HIGHER_IS_BETTER)


class Verdict(Enum):
    BETTER = "B is better"
    WORSE = "B is worse"
    NOISE = "no more than noise"


@dataclass(frozen=True, slots=True)
class Difference:
    """``ratio`` is B / A, with its interval."""

    name: str
    a: float
    b: float
    ratio: float
    least: float
    most: float

    @property
    def verdict(self) -> Verdict:
        if self.least <= 1.0 <= self.most:
            return Verdict.NOISE
        return Verdict.BETTER if (self.ratio > 1.0) == _HIGHER_IS_BETTER[self.name] else Verdict.WORSE


def has_repeats(a: Result, b: Result) -> bool:
    """Whether the spread over repeats is taken for noise."""
    return min(len(a.runs), len(b.runs)) >= _FEWEST_REPEATS


def compare(a: Result, b: Result) -> list[Difference]:
    """Of each figure that both have and that is above 0 on both sides."""
    rng = np.random.default_rng(0)
    logs_a, logs_b = _logs(a), _logs(b)
    names = [name for name in COMPARED if name in logs_a and name in logs_b]
    if has_repeats(a, b):
        halves = {name: _welch(logs_a[name], logs_b[name], rng) for name in names}
    else:
        halves = _within_runs(a, b, names, rng)
    return [_difference(name, logs_a[name], logs_b[name], halves[name]) for name in names]


def _difference(name: str, a: Sequence[float], b: Sequence[float], half: float) -> Difference:
    mean_a, mean_b = float(np.mean(a)), float(np.mean(b))
    shift = mean_b - mean_a
    return Difference(name, math.exp(mean_a), math.exp(mean_b), math.exp(shift), _exp(shift - half), _exp(shift + half))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700.0 else math.inf


def _logs(result: Result) -> dict[str, list[float]]:
    """Of each figure that is a number above 0 in every repeat."""
    repeats = [flat(values) for values in result.figures()]
    found = {name: [values.get(name, math.nan) for values in repeats] for name in COMPARED}
    positive = {name: values for name, values in found.items() if all(value > 0.0 for value in values)}
    return {name: [math.log(value) for value in values] for name, values in positive.items()}


def _welch(a: Sequence[float], b: Sequence[float], rng: np.random.Generator) -> float:
    """Half the width of the interval of the difference of means."""
    errors = [float(np.var(values, ddof=1)) / len(values) for values in (a, b)]
    total = sum(errors)
    if total == 0.0:
        return 0.0
    freedom = total**2 / sum(error**2 / (len(values) - 1) for error, values in zip(errors, (a, b), strict=True))
    quantile = float(np.quantile(np.abs(rng.standard_t(freedom, _NUM_DRAWS)), _CONFIDENCE))
    return quantile * math.sqrt(total)


def _within_runs(a: Result, b: Result, names: Sequence[str], rng: np.random.Generator) -> dict[str, float]:
    """Half widths, from the standard errors of both sides."""
    quantile = NormalDist().inv_cdf((1.0 + _CONFIDENCE) / 2.0)
    errors = [relative_errors(result, names, rng) for result in (a, b)]
    return {name: quantile * math.hypot(*[error[name] for error in errors]) for name in names}
