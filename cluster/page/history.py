"""History: the points of the page's curves, each of the few seconds before it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..watch.top.samples import Samples, Window

WINDOW_S = 5.0
"""Rates and latencies are of so long: a second with few requests says little."""
MOST_PAUSE_S = 15.0
"""Nobody has looked for longer: the time between is of no interest."""
MOST_POINTS = 300


@dataclass(frozen=True, slots=True)
class Point:
    """Of the whole cluster. None where there was nothing to measure."""

    at: float
    """Unix time in seconds: points of several gateways can be told apart and put in order."""
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    """Between two tokens of an output."""
    tpot_p99_s: float | None
    prompt_tokens_per_s: float
    """That had to be computed."""
    generated_tokens_per_s: float
    requests_per_s: float
    hit_rate: float | None
    """Prompt tokens that were found cached, as a share."""


class History:
    """Keeps what was seen last, as numbers and as points."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Samples]] = deque()
        """With the moment, on the caller's clock."""
        self._points: deque[Point] = deque(maxlen=MOST_POINTS)

    def add(self, samples: Samples, now: float, at: float) -> Window | None:
        """A new look at the cluster's metrics. The time since an earlier one; None when there is none of late."""
        if self._seen and now - self._seen[-1][0] > MOST_PAUSE_S:
            self._seen.clear()
        self._seen.append((now, samples))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        then, before = self._seen[0]
        if then == now:
            return None
        window = Window(before, samples, now - then)
        self._points.append(_point(window, at))
        return window

    def since(self, at: float) -> list[Point]:
        """The points after that moment, oldest first."""
        return [point for point in self._points if point.at > at]


def _point(window: Window, at: float) -> Point:
    queried = window.rate("octavo_prefix_cache_queries_total")
    hits = window.rate("octavo_prefix_cache_hits_total")
    ttft, tpot = "octavo_time_to_first_token_seconds", "octavo_inter_token_latency_seconds"
    return Point(
        at,
        window.quantile(ttft, 0.5),
        window.quantile(ttft, 0.99),
        window.quantile(tpot, 0.5),
        window.quantile(tpot, 0.99),
        queried - hits,
        window.rate("octavo_generation_tokens_total"),
        window.rate("octavo_request_success_total"),
        hits / queried if queried else None,
    )
