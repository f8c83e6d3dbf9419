"""What is measured with every token, in plain numbers: prometheus_client's own counters take 3 µs for each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenMetrics(Collector):
    """Used by one thread; read by any."""

    def __init__(self, labels: Sequence[str], values: Sequence[str], latency_buckets: Sequence[float]) -> None:
        self._labels = labels
        self._values = values
        self._buckets = (*latency_buckets, float("inf"))
        self._num_by_bucket = [0] * len(self._buckets)
        self._latency_sum_s = 0.0
        self._num_tokens = 0

    def add(self, num: int, latency_s: float | None) -> None:
        """So many output tokens, each ``latency_s`` after the one before; None: they are the first of their output."""
        self._num_tokens += num
        if latency_s is not None:
            self._num_by_bucket[bisect_left(self._buckets, latency_s)] += num
            self._latency_sum_s += latency_s * num

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("octavo_generation_tokens", "Output tokens received.", labels=self._labels)
        tokens.add_metric(self._values, self._num_tokens)
        yield tokens
        latency = HistogramMetricFamily(
            "octavo_inter_token_latency_seconds", "Between two tokens of one output.", labels=self._labels
        )
        bounds = map(floatToGoString, self._buckets)
        latency.add_metric(
            self._values, list(zip(bounds, accumulate(self._num_by_bucket), strict=True)), self._latency_sum_s
        )
        yield latency
