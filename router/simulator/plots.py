"""What several policies did with a trace, in one figure. Matplotlib is loaded when it is drawn."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .metrics import Result

Floats = npt.NDArray[np.float64]

_SIZE_INCHES = (15.0, 8.5)
_NUM_WINDOWS = 60
"""Of the trace's time."""
_STYLES = ("-", "--", "-.", ":")
"""Lines of several policies can be told apart without their colours."""


def write_png(path: Path, results: Mapping[str, Result], infinite_hit_rate: float, slo_s: tuple[float, float]) -> None:
    """``slo_s``: to the first token, and between tokens. OSError when the file cannot be written."""
    _draw(results, infinite_hit_rate, slo_s).savefig(path, format="png", dpi=120)


def svg(results: Mapping[str, Result], infinite_hit_rate: float, slo_s: tuple[float, float]) -> str:
    """The same as an ``<svg>`` element that refers to nothing outside of it."""
    import matplotlib

    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "octavo"}):
        _draw(results, infinite_hit_rate, slo_s).savefig(text, format="svg", metadata=nothing)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw(results: Mapping[str, Result], infinite_hit_rate: float, slo_s: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(_SIZE_INCHES, layout="constrained")
    (hits, good, balance), (first, gaps, over_time) = figure.subplots(2, 3)
    _bars(hits, "Blocks found in a cache", results, lambda result: result.block_hit_rate)
    hits.axhline(infinite_hit_rate, color="black", linestyle=":", label="infinite cache")
    hits.legend()
    _bars(good, f"Requests within {slo_s[0]:g} s and {slo_s[1]:g} s a token", results, lambda r: r.goodput(*slo_s))
    _bars(balance, "Prompt tokens computed, most / mean of groups", results, lambda result: result.imbalance)
    _curves(first, "Time to first token, s", results, _first_token_curve, slo_s[0])
    _curves(gaps, "Time between tokens, s", results, _gap_curve, slo_s[1])
    _lines_over_time(over_time, results)
    return figure


def _bars(axes: Any, title: str, results: Mapping[str, Result], value_of: Callable[[Result], float]) -> None:
    values = [value_of(result) for result in results.values()]
    bars = axes.bar(range(len(values)), values, color=[f"C{number}" for number in range(len(values))])
    axes.bar_label(bars, fmt="{:.3g}")
    axes.set_xticks(range(len(values)), list(results), rotation=20, ha="right")
    axes.set_title(title)


def _curves(
    axes: Any,
    title: str,
    results: Mapping[str, Result],
    curve_of: Callable[[Result], tuple[Floats, Floats]],
    limit_s: float,
) -> None:
    for number, (name, result) in enumerate(results.items()):
        axes.step(*curve_of(result), where="post", label=name, **_style(number))
    axes.axvline(limit_s, color="black", linestyle=":", label="limit")
    axes.set_xscale("log")
    axes.set_ylim(0.0, 1.0)
    axes.set_title(title)
    axes.set_ylabel("share that took no longer")
    axes.grid(alpha=0.3)
    axes.legend()


def _first_token_curve(result: Result) -> tuple[Floats, Floats]:
    times_s = np.sort(result.first_token_times_s())
    return times_s, np.arange(1, len(times_s) + 1) / max(1, len(times_s))


def _gap_curve(result: Result) -> tuple[Floats, Floats]:
    times_s, counts = np.array(result.gaps or ((1.0, 0),), np.float64).T
    return times_s, np.cumsum(counts) / max(1.0, counts.sum())


def _lines_over_time(axes: Any, results: Mapping[str, Result]) -> None:
    for number, (name, result) in enumerate(results.items()):
        axes.plot(*_means_over_time(result.arrivals_s, result.first_token_times_s()), label=name, **_style(number))
    axes.set_yscale("log")
    axes.set_title("Time to first token over the trace, s")
    axes.set_xlabel("arrival, s")
    axes.set_ylabel(f"mean of a {_NUM_WINDOWS}th of the time")
    axes.grid(alpha=0.3)
    axes.legend()


def _means_over_time(arrivals_s: Sequence[float], times_s: Floats) -> tuple[Floats, Floats]:
    """Middles of the windows in which anything came, and the mean time of what came; of refused ones there is none."""
    arrivals, known = np.asarray(arrivals_s), ~np.isnan(times_s)
    edges = np.linspace(arrivals[0], max(arrivals[-1], arrivals[0] + 1e-9), _NUM_WINDOWS + 1)
    counts, sums = (np.histogram(arrivals[known], edges, weights=weights)[0] for weights in (None, times_s[known]))
    used = counts > 0
    return ((edges[1:] + edges[:-1]) / 2)[used], sums[used] / counts[used]


def _style(number: int) -> dict[str, Any]:
    return {"color": f"C{number}", "linestyle": _STYLES[number % len(_STYLES)]}
