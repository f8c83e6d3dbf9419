"""A result as text for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...router.simulator.table import table
from .compare import Difference
from .figures import PERCENTILES
from .result import Result, Spread

_CUTS = ("mean", *PERCENTILES, "max")
_TIMES = {
    "ttft_s": "time to first token, ms",
    "tpot_s": "time per output token, ms",
    "itl_s": "between pieces of text, ms",
    "e2e_s": "end to end, ms",
}
_OWN_CONDITIONS = ("base_url", "time")
_LATE_S, _BUSY = 0.005, 0.8
"""From here on the generator itself shows in the figures."""


def time_rows(result: Result) -> list[tuple[str, ...]]:
    """Headings, and a row for each time; below it, how far repeats differ (standard deviation)."""
    spreads = result.spreads()
    rows: list[tuple[str, ...]] = [("", *_CUTS)]
    for key, label in _TIMES.items():
        found = [spreads[f"{key}.{cut}"] for cut in _CUTS]
        rows.append((label, *[_milliseconds(spread.mean) for spread in found]))
        if len(result.runs) > 1:
            rows.append(("    ±", *[_milliseconds(spread.deviation or 0.0) for spread in found]))
    return rows


def lines(result: Result) -> Iterator[str]:
    """What is not a time; figures are means over the repeats."""
    repeats, spreads = result.figures(), result.spreads()
    yield _requests_line(repeats)
    yield from _error_lines(repeats)
    yield (
        f"throughput: {_number(spreads['requests_per_s'])} requests/s,"
        f" {_number(spreads['output_tokens_per_s'])} output tokens/s, {_number(spreads['tokens_per_s'])} tokens/s"
    )
    if "goodput" in spreads:
        share, rate = spreads["goodput"], spreads["goodput_per_s"]
        yield f"goodput: {share.mean:.1%} of requests within the limits, {_number(rate)} requests/s"
    if "cached_share" in spreads:
        computed = _number(spreads["num_computed_prompt_tokens"])
        yield f"prompts: {spreads['cached_share'].mean:.1%} of their tokens from a cache, {computed} tokens computed"
    yield from _group_lines(repeats)
    yield from _generator_lines(spreads)


def text(result: Result) -> str:
    return "\n".join([result.title, "", table(time_rows(result)), "", *lines(result)])


def changes(a: Result, b: Result) -> Iterator[str]:
    """The conditions that are not the same."""
    for name in dict.fromkeys([*a.conditions, *b.conditions]):
        ours, theirs = (result.conditions.get(name) for result in (a, b))
        if ours != theirs and name not in _OWN_CONDITIONS:
            yield f"{name}: {ours} / {theirs}"


def comparison(differences: Sequence[Difference], *, by_repeats: bool) -> str:
    rows: list[tuple[str, ...]] = [("", "A", "B", "B / A", "99 % interval", "")]
    for each in differences:
        interval = f"{each.least:.3f} to {each.most:.3f}"
        values = [f"{value:.4g}" for value in (each.a, each.b)]
        rows.append((each.name, *values, f"{each.ratio:.3f}", interval, each.verdict.value))
    noise = "the spread over repeats" if by_repeats else "what varies within the runs; repeats would say more"
    return f"{table(rows)}\n\nnoise: {noise}"


def _requests_line(repeats: Sequence[Mapping[str, Any]]) -> str:
    num_good, num = sum(r["num_good"] for r in repeats), sum(r["num_requests"] for r in repeats)
    unsent = sum(r["num_unsent"] for r in repeats)
    seconds = sum(r["duration_s"] for r in repeats)
    more = f", {unsent} not sent" if unsent else ""
    most = max(r["most_in_flight"] for r in repeats)
    return f"requests: {num_good} of {num} answered{more}, in {seconds:.1f} s, at most {most} at once"


def _error_lines(repeats: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    kinds = dict.fromkeys(kind for values in repeats for kind in values["errors"])
    for kind in kinds:
        found = [values["errors"][kind] for values in repeats if kind in values["errors"]]
        example = " ".join(found[0]["example"].split())
        yield f"error: {sum(each['count'] for each in found)} × {kind}{f', such as: {example}' if example else ''}"


def _group_lines(repeats: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not all("groups" in values for values in repeats):
        return
    for number, values in enumerate(repeats, 1):
        counts = ", ".join(f"{name} {group['num_requests']}" for name, group in values["groups"].items())
        which = f"groups, repeat {number}" if len(repeats) > 1 else "groups"
        imbalance = values["imbalance"]
        more = "" if math.isnan(imbalance) else f"; prompt tokens computed, most / mean: {imbalance:.2f}"
        yield f"{which}: {counts} requests{more}"


def _generator_lines(spreads: Mapping[str, Spread]) -> Iterator[str]:
    late_s, cpu = spreads["late_s.p99"].mean, spreads["client_cpu"].mean
    yield f"this generator: late by {_milliseconds(late_s)} ms (p99), {cpu:.0%} of a core"
    if late_s > _LATE_S or cpu > _BUSY:
        yield "warning: the generator was late or busy; times hold what it waited itself"


def _milliseconds(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{1e3 * seconds:.2f}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _number(spread: Spread) -> str:
    def shown(value: float) -> str:
        return f"{value:,.0f}" if value >= 100.0 else f"{value:.2f}"

    return shown(spread.mean) if spread.deviation is None else f"{shown(spread.mean)} ± {shown(spread.deviation)}"
