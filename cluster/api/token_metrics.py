"""What is measured with every token, in plain numbers: prometheus_client's own counters take 3 µs for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from ...worker.histogram import Histogram


class TokenMetrics(Collector):
    """Used by one thread; read by any."""

    def __init__(self, labels: Mapping[str, str], latency_bounds: Sequence[float]) -> None:
        self.latency_s = Histogram(latency_bounds)
        """From the token before in the same output."""
        self._labels = labels
        self._num_tokens = 0

    def add(self, num: int, latency_s: float | None) -> None:
        """So many output tokens, each ``latency_s`` after the one before; None: they are the first of their output."""
        self._num_tokens += num
        if latency_s is not None:
            self.latency_s.add(latency_s, num)

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("octavo_generation_tokens", "Output tokens received.", labels=[*self._labels])
        tokens.add_metric([*self._labels.values()], self._num_tokens)
        yield tokens
