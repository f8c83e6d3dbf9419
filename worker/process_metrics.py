"""What every process of the cluster says of itself: processor time, memory, open files, how late its event loop is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .histogram import Histogram

LAG_PERIOD_S = 0.25


class LoopLag:
    """How late timers of the event loop fire: what else it does, and how long it waits for a processor."""

    def __init__(self) -> None:
        self.seconds = Histogram()

    async def run(self) -> None:
        """Measure for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            due_s = clock() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self.seconds.add(max(0.0, clock() - due_s))


class ProcessMetrics(Collector):
    """Of this process. ``labels`` tell it from the others."""

    def __init__(self, labels: Mapping[str, str], lag: LoopLag) -> None:
        self._labels = labels
        self._lag = lag
        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        process = self._process
        with process.oneshot():
            times, memory = process.cpu_times(), process.memory_info()
            yield self._counter("cpu_seconds", "Processor time.", times.user + times.system)
            yield self._gauge("resident_memory_bytes", "Resident memory.", memory.rss)
            yield self._gauge("threads", "Threads.", process.num_threads())
            yield self._gauge("start_time_seconds", "Start, seconds since the epoch.", process.create_time())
        yield self._gauge("open_fds", "Open files and sockets.", process.num_fds())
        lag = HistogramMetricFamily(
            "octavo_event_loop_lag_seconds", "How late timers of the event loop fired.", labels=[*self._labels]
        )
        lag.add_metric([*self._labels.values()], self._lag.seconds.buckets(), self._lag.seconds.sum)
        yield lag

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"octavo_process_{name}", text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"octavo_process_{name}", text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], value)
        return family


def render(*collectors: Collector) -> str:
    """Prometheus text exposition, format 0.0.4, in a registry of its own."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry).decode()
