"""How much the figures of a result vary by chance, judged by the result alone.

Times and shares by a bootstrap over scripts (Efron, Annals of Statistics 7, 1979): requests of one conversation are not
independent. Rates by their spread over ten parts of the run's time: of a fixed number of requests a bootstrap would
find the same rate again each time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .figures import figures, flat
from .result import Result
from .sample import Run, Sample
from .slo import Slo

_NUM_RESAMPLES = 100
_NUM_PARTS = 10


def relative_errors(result: Result, names: Sequence[str], rng: np.random.Generator) -> dict[str, float]:
    """The standard error of the logarithm of each figure's mean over the runs."""
    resampled = [_resampled_figures(result, rng) for _ in range(_NUM_RESAMPLES)]
    return {name: _rate_error(result, name) if name in _WEIGHTS else _deviation(resampled, name) for name in names}


def _deviation(resampled: Sequence[Mapping[str, float]], name: str) -> float:
    logs = [math.log(values[name]) for values in resampled if values.get(name, math.nan) > 0.0]
    return float(np.std(logs, ddof=1)) if len(logs) > 1 else math.inf


def _resampled_figures(result: Result, rng: np.random.Generator) -> dict[str, float]:
    """Means over the runs."""
    repeats = [flat(figures(_resampled(run, rng), result.slo)) for run in result.runs]
    return {name: float(np.mean([values.get(name, math.nan) for values in repeats])) for name in repeats[0]}


def _resampled(run: Run, rng: np.random.Generator) -> Run:
    scripts: defaultdict[int, list[Sample]] = defaultdict(list)
    for sample in run.samples:
        scripts[sample.script].append(sample)
    known = list(scripts.values())
    drawn = rng.integers(len(known), size=len(known)).tolist() if known else []
    return replace(run, samples=tuple([sample for number in drawn for sample in known[number]]))


def _rate_error(result: Result, name: str) -> float:
    errors = [_error_of_parts(_per_part(run, _WEIGHTS[name], result.slo or Slo())) for run in result.runs]
    return math.hypot(*errors) / len(errors)


def _per_part(run: Run, weight: Callable[[Sample, Slo], float], slo: Slo) -> list[float]:
    good = run.good()
    ends_s = [sample.token_times_s[-1] for sample in good]
    weights = [weight(sample, slo) for sample in good]
    parts: list[float] = np.histogram(ends_s, _NUM_PARTS, (0.0, run.wall_s), weights=weights)[0].tolist()
    return parts


def _error_of_parts(parts: Sequence[float]) -> float:
    mean = float(np.mean(parts))
    return float(np.std(parts, ddof=1)) / math.sqrt(len(parts)) / mean if mean else math.inf


_WEIGHTS: dict[str, Callable[[Sample, Slo], float]] = {
    "requests_per_s": lambda sample, slo: 1.0,
    "output_tokens_per_s": lambda sample, slo: float(sample.num_tokens),
    "tokens_per_s": lambda sample, slo: float(sample.num_tokens + (sample.num_prompt_tokens or 0)),
    "goodput_per_s": lambda sample, slo: float(slo.is_met_by(sample)),
}
