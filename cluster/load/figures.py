"""The figures of one run, from its samples, as plain values for JSON."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .sample import Run, Sample
from .slo import Slo

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9}
TIMES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
_WITHOUT_NAME = "unknown"


def figures(run: Run, slo: Slo | None = None) -> dict[str, Any]:
    """Times are of requests that were answered whole, as is throughput; without any, they are NaN.

    ``itl_s`` is between two pieces of text of an answer, over all of them; a piece may hold several tokens.
    """
    good = run.good()
    num_prompt, num_output = _total(good, "num_prompt_tokens"), sum(sample.num_tokens for sample in good)
    return {
        "num_requests": len(run.samples),
        "num_good": len(good),
        "num_unsent": run.num_unsent,
        "errors": errors(run.samples),
        "duration_s": run.wall_s,
        "requests_per_s": len(good) / run.wall_s,
        "output_tokens_per_s": num_output / run.wall_s,
        "tokens_per_s": (num_prompt + num_output) / run.wall_s,
        **_times(good),
        **(_goodput(run, slo) if slo is not None else {}),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        **_cached(good),
        **_balance(good),
        "most_in_flight": _most_in_flight(good),
        "late_s": distribution([sample.late_s for sample in run.samples]),
        "client_cpu": run.cpu_s / run.wall_s,
    }


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles (linear between the two values next to it) and the largest, NaN left out."""
    array = np.asarray(values, np.float64)
    array = array[~np.isnan(array)]
    if not array.size:
        return dict.fromkeys(("mean", *PERCENTILES, "max"), math.nan)
    cuts = np.percentile(array, list(PERCENTILES.values())).tolist()
    return {"mean": float(array.mean()), **dict(zip(PERCENTILES, cuts, strict=True)), "max": float(array.max())}


def gaps_s(samples: Iterable[Sample]) -> list[float]:
    """Between two pieces of text of one answer, of all."""
    return [gap for sample in samples for gap in np.diff(sample.token_times_s).tolist()]


def errors(samples: Iterable[Sample]) -> dict[str, dict[str, Any]]:
    """Kind → how many, and what the first of them said."""
    failed = [sample for sample in samples if sample.error is not None]
    first = {sample.error: sample.message for sample in reversed(failed)}
    counts = Counter(sample.error for sample in failed)
    return {str(kind): {"count": count, "example": first[kind]} for kind, count in counts.most_common()}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """All numbers of nested figures: ``ttft_s.p50``."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + name] = float(value)
    return found


def _times(good: Sequence[Sample]) -> dict[str, dict[str, float]]:
    return {
        "ttft_s": distribution([sample.ttft_s for sample in good]),
        "tpot_s": distribution([sample.tpot_s for sample in good]),
        "itl_s": distribution(gaps_s(good)),
        "e2e_s": distribution([sample.e2e_s for sample in good]),
    }


def _goodput(run: Run, slo: Slo) -> dict[str, float]:
    """Share of what was asked, and requests a second."""
    num_met = sum(slo.is_met_by(sample) for sample in run.samples)
    return {"goodput": num_met / max(1, len(run.samples)), "goodput_per_s": num_met / run.wall_s}


def _cached(good: Sequence[Sample]) -> dict[str, float]:
    """Only where the server says so of every answer."""
    if not good or any(sample.num_cached_tokens is None or not sample.num_prompt_tokens for sample in good):
        return {}
    num_prompt, num_cached = _total(good, "num_prompt_tokens"), _total(good, "num_cached_tokens")
    return {
        "num_cached_tokens": num_cached,
        "num_computed_prompt_tokens": num_prompt - num_cached,
        "cached_share": num_cached / num_prompt,
    }


def _balance(good: Sequence[Sample]) -> dict[str, Any]:
    """Where the server names its groups: what each did. ``imbalance``: the prompt tokens that the busiest computed, by
    the mean over the groups that were seen."""
    if all(sample.group is None for sample in good):
        return {}
    by_group: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in good:
        by_group[sample.group or _WITHOUT_NAME].append(sample)
    groups = {
        name: {"num_requests": len(samples), "num_computed_prompt_tokens": _computed(samples)}
        for name, samples in sorted(by_group.items())
    }
    computed = [group["num_computed_prompt_tokens"] for group in groups.values()]
    return {"groups": groups, "imbalance": max(computed) * len(computed) / sum(computed) if sum(computed) else math.nan}


def _computed(samples: Sequence[Sample]) -> int:
    return _total(samples, "num_prompt_tokens") - _total(samples, "num_cached_tokens")


def _total(samples: Iterable[Sample], name: str) -> int:
    return sum(getattr(sample, name) or 0 for sample in samples)


def _most_in_flight(good: Sequence[Sample]) -> int:
    changes = [(sample.sent_s, 1) for sample in good] + [(sample.token_times_s[-1], -1) for sample in good]
    return int(np.cumsum([change for _, change in sorted(changes)]).max(initial=0))
