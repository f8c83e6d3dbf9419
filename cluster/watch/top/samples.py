"""Samples: a Prometheus exposition as numbers, and what two of them say of the time between.

The client library's parser takes 20 times as long, seconds for a hundred worker groups.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

_SERIES = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")

Labels = Mapping[str, str]


class Samples:
    """All series of one exposition (format 0.0.4, without timestamps); lines that are none are passed over."""

    def __init__(self, text: str) -> None:
        self._of: dict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(dict)
        for name, labels, value in _SERIES.findall(text):
            self._of[name][tuple(sorted(_labels(labels)))] = float(value)

    def __bool__(self) -> bool:
        return bool(self._of)

    def series(self, name: str, **wanted: str) -> Iterator[tuple[Labels, float]]:
        """Series of this name that have these labels."""
        pairs = wanted.items()
        for labels, value in self._of.get(name, {}).items():
            if all(pair in labels for pair in pairs):
                yield dict(labels), value

    def exactly(self, name: str, labels: Labels) -> float | None:
        """The value of the series with these labels and no other; None where there is none."""
        return self._of.get(name, {}).get(tuple(sorted(labels.items())))

    def total(self, name: str, **wanted: str) -> float:
        """Their sum; 0.0 without any."""
        return sum(value for _, value in self.series(name, **wanted))

    def value(self, name: str, **wanted: str) -> float | None:
        """Of the first of them; None without one."""
        return next((value for _, value in self.series(name, **wanted)), None)


def _labels(text: str) -> Iterator[tuple[str, str]]:
    for name, value in _LABEL.findall(text):
        yield name, _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], value)


class Window:
    """Two expositions of one cluster, ``seconds`` apart. What was not there before counts from zero, and what has begun
    anew, which is smaller than before, from zero again."""

    def __init__(self, before: Samples, now: Samples, seconds: float) -> None:
        self.now = now
        self._before = before
        self._seconds = seconds

    def rate(self, name: str, **wanted: str) -> float:
        """How much counters grew in a second, together."""
        grown = [self._grown(name, labels, value) for labels, value in self.now.series(name, **wanted)]
        return sum(grown) / self._seconds

    def _grown(self, name: str, labels: Labels, value: float) -> float:
        before = self._before.exactly(name, labels) or 0.0
        return value - before if value >= before else value

    def quantile(self, name: str, share: float, **wanted: str) -> float | None:
        """Of what a histogram was given between the two; None when that was nothing.

        As Prometheus' histogram_quantile: values lie evenly in their bucket.
        """
        counts: dict[float, float] = defaultdict(float)
        for labels, value in self.now.series(f"{name}_bucket", **wanted):
            counts[float(labels["le"])] += self._grown(f"{name}_bucket", labels, value)
        bounds = sorted(counts)
        if not bounds or counts[bounds[-1]] <= 0.0:
            return None
        return _quantile(bounds, [counts[bound] for bound in bounds], share)


def _quantile(bounds: list[float], cumulated: list[float], share: float) -> float:
    rank = share * cumulated[-1]
    place = next(index for index, count in enumerate(cumulated) if count >= rank)
    below, low = (cumulated[place - 1], bounds[place - 1]) if place else (0.0, 0.0)
    if math.isinf(bounds[place]):
        return low
    inside = cumulated[place] - below
    return low + (bounds[place] - low) * ((rank - below) / inside if inside else 1.0)
