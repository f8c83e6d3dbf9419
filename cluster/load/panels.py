"""A result drawn: one figure for a PNG file, or a row of small SVG ones that follow the page's colours."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from .figures import gaps_s
from .result import Result
from .sample import Run, Sample

_NUM_PARTS = 60
"""Of a run's time."""
_LEAST_S = 1e-6
"""Less is drawn as this: what came in one piece has no time between it."""
_INK = "#010203"
"""Stands for the page's text colour until the SVG is written."""
_INK_SETTINGS = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
Panel: TypeAlias = Callable[[Any, Result], None]


def write_png(path: Path, result: Result) -> None:
    """OSError when the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure((15.0, 8.5), layout="constrained")
    for axes, panel in zip(figure.subplots(2, 3).flat, _PANELS, strict=True):
        panel(axes, result)
    figure.suptitle(result.title)
    figure.savefig(path, format="png", dpi=120)


def svgs(result: Result) -> list[str]:
    """``<svg>`` elements that refer to nothing outside of them."""
    return [_svg(panel, result) for panel in _PANELS]


def _svg(panel: Panel, result: Result) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    ink = dict.fromkeys(_INK_SETTINGS, _INK)
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": panel.__name__, **ink}
    text, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(settings):
        figure = Figure((5.0, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.set_facecolor("none")
        panel(axes, result)
        if (legend := axes.get_legend()) is not None:
            legend.get_frame().set_facecolor("none")
        figure.savefig(text, format="svg", metadata=nothing, transparent=True)
    return text.getvalue()[text.getvalue().index("<svg") :].replace(_INK, "currentColor")


def _first_tokens(axes: Any, result: Result) -> None:
    limit_s = None if result.slo is None else result.slo.ttft_s
    _shares(axes, result, "Time to first token, s", lambda good: [sample.ttft_s for sample in good], limit_s)


def _per_token(axes: Any, result: Result) -> None:
    limit_s = None if result.slo is None else result.slo.tpot_s
    _shares(axes, result, "Time per output token, s", lambda good: [sample.tpot_s for sample in good], limit_s)


def _gaps(axes: Any, result: Result) -> None:
    _shares(axes, result, "Between pieces of text, s", gaps_s, None)


def _shares(
    axes: Any, result: Result, title: str, values_of: Callable[[Sequence[Sample]], list[float]], limit_s: float | None
) -> None:
    for number, run in enumerate(result.runs):
        values = np.array(values_of(run.good()), np.float64)
        values = np.sort(np.maximum(values[~np.isnan(values)], _LEAST_S))
        axes.step(values, np.arange(1, len(values) + 1) / max(1, len(values)), where="post", **_style(number))
    if limit_s is not None and np.isfinite(limit_s):
        axes.axvline(limit_s, color="C3", linestyle=":", label="limit")
        axes.legend()
    axes.set_xscale("log")
    _label(axes.xaxis)
    axes.set_ylim(0.0, 1.0)
    axes.set_ylabel("share that took no longer")
    _finish(axes, title)


def _over_time(axes: Any, result: Result) -> None:
    for number, run in enumerate(result.runs):
        good = run.good()
        axes.plot([s.due_s for s in good], [s.ttft_s for s in good], ".", markersize=3, color=f"C{number % 10}")
    axes.set_xlabel("due, s")
    axes.set_yscale("log")
    _label(axes.yaxis)
    _finish(axes, "Time to first token over the run, s")


def _in_flight(axes: Any, result: Result) -> None:
    for number, run in enumerate(result.runs):
        starts, ends = _times(run, lambda s: s.sent_s), _times(run, lambda s: s.token_times_s[-1])
        at_s = np.linspace(0.0, run.wall_s, 4 * _NUM_PARTS)
        axes.plot(at_s, np.searchsorted(starts, at_s, "right") - np.searchsorted(ends, at_s, "right"), **_style(number))
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("s")
    _finish(axes, "Requests under way")


def _tokens(axes: Any, result: Result) -> None:
    for number, run in enumerate(result.runs):
        times_s = [time_s for sample in run.good() for time_s in sample.token_times_s]
        weights = [s.num_tokens / len(s.token_times_s) for s in run.good() for _ in s.token_times_s]
        counts, edges = np.histogram(times_s, _NUM_PARTS, (0.0, max(run.wall_s, 1e-9)), weights=weights)
        axes.step(edges[:-1], counts / np.diff(edges), where="post", **_style(number))
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("s")
    _finish(axes, "Output tokens per second")


def _times(run: Run, time_of: Callable[[Sample], float]) -> list[float]:
    return sorted([time_of(sample) for sample in run.good()])


def _label(axis: Any) -> None:
    """A logarithmic one, also where it spans less than a decade."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _finish(axes: Any, title: str) -> None:
    axes.set_title(title)
    axes.grid(alpha=0.25)


def _style(number: int) -> dict[str, Any]:
    """Repeats can be told apart without their colours."""
    return {"color": f"C{number % 10}", "linestyle": ("-", "--", "-.", ":")[number % 4]}


_PANELS: tuple[Panel, ...] = (_first_tokens, _per_token, _gaps, _over_time, _in_flight, _tokens)
