"""Medians over the rounds, Octavo's ratios to its peers, and what they are expected to be."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from .servers import Server
from .workloads import Figures


@dataclass(frozen=True)
class Expected:
    """``least``: Octavo's figure over the best peer's; peers of float32 only, or of any precision."""

    metric: str
    least: float
    any_precision: bool


EXPECTED = {
    "float32": [
        Expected("W1 tokens/s", 1.15, any_precision=False),
        Expected("W2 tokens/s", 1.25, any_precision=False),
        Expected("W3 cold tokens/s", 1.6, any_precision=False),
        Expected("W3 warm tokens/s", 1.4, any_precision=False),
        Expected("W4 tokens/s", 1.1, any_precision=False),
    ],
    "int8": [
        Expected("W1 tokens/s", 1.0, any_precision=True),
        Expected("W2 tokens/s", 1.8, any_precision=True),
        Expected("W4 tokens/s", 1.5, any_precision=True),
    ],
}
MOST_START_S = 25.0
COLUMNS = (
    ("W1 tokens/s", 1),
    ("W1 TTFT s", 2),
    ("W2 tokens/s", 1),
    ("W2 p99 gap ms", 0),
    ("W3 cold tokens/s", 1),
    ("W3 cold TTFT s", 2),
    ("W3 warm tokens/s", 1),
    ("W3 warm TTFT s", 2),
    ("W4 tokens/s", 0),
    ("start s", 1),
    ("greedy equal", 0),
)
"""Metrics in the order of the table, with their decimals."""


def medians(rounds: Iterable[Figures]) -> Figures:
    """Of each metric over the rounds that have it."""
    values: dict[str, list[float]] = {}
    for figures in rounds:
        for metric, value in figures.items():
            values.setdefault(metric, []).append(value)
    return {metric: statistics.median(each) for metric, each in values.items()}


def ratios(servers: Iterable[Server], figures: dict[str, Figures]) -> list[dict[str, object]]:
    """One row for each expectation that could be measured: Octavo's variant, the best peer, their ratio."""
    servers = list(servers)
    return [
        row
        for server in servers
        if server.is_octavo
        for expected in EXPECTED.get(server.precision, [])
        if (row := _ratio(server, expected, servers, figures)) is not None
    ]


def _ratio(
    server: Server, expected: Expected, servers: list[Server], figures: dict[str, Figures]
) -> dict[str, object] | None:
    metric = expected.metric
    peers = {
        peer.name: figures[peer.name][metric]
        for peer in servers
        if not peer.is_octavo
        and metric in figures.get(peer.name, {})
        and (expected.any_precision or peer.precision == "float32")
    }
    ours = figures.get(server.name, {}).get(metric)
    if ours is None or not peers:
        return None
    best = max(peers, key=lambda name: peers[name])
    ratio = ours / peers[best]
    return {
        "server": server.name,
        "metric": metric,
        "peer": best,
        "ratio": round(ratio, 3),
        "wanted": expected.least,
        "reached": ratio >= expected.least,
    }


def table(figures: dict[str, Figures]) -> str:
    """A row for each metric that somebody has, a column for each server; a dash where there is no figure."""
    names = list(figures)
    metrics = [(metric, digits) for metric, digits in COLUMNS if any(metric in each for each in figures.values())]
    widths = [max(len(name), 8) for name in names]
    rows = [" " * 18 + "".join(f"{name:>{width + 2}}" for name, width in zip(names, widths, strict=True))]
    for metric, digits in metrics:
        cells = [_cell(figures[name].get(metric), digits) for name in names]
        rows.append(f"{metric:18}" + "".join(f"{cell:>{width + 2}}" for cell, width in zip(cells, widths, strict=True)))
    return "\n".join(rows)


def _cell(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def sentences(rows: list[dict[str, object]], figures: dict[str, Figures]) -> list[str]:
    """The ratios, and the starts, each with what was wanted."""
    found = [
        f"{row['server']}, {row['metric']}: {row['ratio']:.2f} × {row['peer']} (wanted at least {row['wanted']} ×)"
        for row in rows
    ]
    starts = {
        name: each["start s"] for name, each in figures.items() if name.startswith("octavo") and "start s" in each
    }
    return found + [
        f"{name}, start: {seconds:.1f} s (wanted at most {MOST_START_S:.0f} s)" for name, seconds in starts.items()
    ]
