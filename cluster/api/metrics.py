"""Prometheus metrics of one gateway, and the merging of several processes' texts.

Names end as vLLM's do and mean the same, seen from the gateway: times include tokenization, routing and transport.
A request is one prompt, whatever the number of its outputs: it counts once in ``request_success``, with the reason of
the output that ended last, and its prompt's tokens count once. What is refused before a worker group is asked for is no
request. One that was given up while it waited has ended as any other that was: abort.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ParamSpec

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ...worker.messages import FinishReason
from .token_metrics import TokenMetrics

_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
_LABELS = ("model_name", "gateway")
_SAMPLE_SUFFIXES = frozenset(("", "_bucket", "_sum", "_count"))


P = ParamSpec("P")
_LOGGER = logging.getLogger(__name__)


def _harmless(measure: Callable[P, None]) -> Callable[P, None]:
    """``measure``, but an exception of it is logged."""

    @functools.wraps(measure)
    def harmless(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            measure(*args, **kwargs)
        except Exception:
            _LOGGER.exception("a metric could not be written")

    return harmless


class GatewayMetrics:
    """The metrics of one gateway in a registry of their own; the label ``gateway`` tells gateways apart."""

    def __init__(self, model: str, gateway: str) -> None:
        self.registry = CollectorRegistry()
        self._own = (model, gateway)
        self.tokens = TokenMetrics(_LABELS, self._own, _ITL_BUCKETS)
        self.registry.register(self.tokens)
        self.time_to_first_token = self._histogram(
            "octavo_time_to_first_token_seconds", "From the request's arrival to its first token.", _TTFT_BUCKETS
        )
        self.e2e_latency = self._histogram(
            "octavo_e2e_request_latency_seconds", "From the request's arrival to its last token.", _LATENCY_BUCKETS
        )
        self.router_queue_time = self._histogram(
            "octavo_gateway_router_queue_seconds",
            "Waited in the router for a worker group with room; requests that had to.",
            _TTFT_BUCKETS,
        )
        self.ttft_ratio = self._histogram(
            "octavo_gateway_ttft_actual_to_expected_ratio",
            "Time from the request's submission to its first token, divided by the router's estimate of it.",
            _RATIO_BUCKETS,
        )
        self.prompt_tokens = self._counter("octavo_prompt_tokens_total", "Prompt tokens of requests that had output.")
        self.cached_tokens = self._counter(
            "octavo_prompt_cached_tokens_total", "Prompt tokens that were taken from the prefix cache."
        )
        self._success = Counter(
            "octavo_request_success_total",
            "Ended requests, by the reason of the output that ended last.",
            [*_LABELS, "finished_reason"],
            registry=self.registry,
        )
        self._http = Counter(
            "octavo_http_requests_total",
            "HTTP answers by route and status.",
            [*_LABELS, "path", "status"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "octavo_gateway_requests_in_flight",
            "Requests that this gateway waits for.",
            _LABELS,
            registry=self.registry,
        ).labels(*self._own)
        self.fallback_routes = self._counter(
            "octavo_gateway_fallback_routes_total", "Requests placed by the gateway because the router did not answer."
        )
        self.failovers = self._counter(
            "octavo_gateway_failovers_total", "Requests that went on at another worker group."
        )
        self.unrecorded = self._counter(
            "octavo_gateway_trace_requests_lost_total", "Requests that --record-trace could not write down."
        )

    @_harmless
    def http_answer(self, path: str, status: int) -> None:
        self._http.labels(*self._own, path, str(status)).inc()

    def ended(self, reason: FinishReason) -> None:
        self._success.labels(*self._own, reason.value).inc()

    def text(self) -> str:
        """Prometheus text exposition, format 0.0.4."""
        return merge_metrics([generate_latest(self.registry).decode()])

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(name, help_text, _LABELS, registry=self.registry).labels(*self._own)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, help_text, _LABELS, buckets=buckets, registry=self.registry).labels(*self._own)


class RequestMeter:
    """Measures one prompt's request from its arrival to the end of its last output.

    Nothing that goes wrong in a measurement is the request's concern: it is logged, and the number is missing.
    """

    def __init__(self, metrics: GatewayMetrics, num_prompt_tokens: int, arrival: float) -> None:
        """``arrival`` is a ``time.perf_counter`` reading."""
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._arrival = arrival
        self._placed = arrival
        self._expected_ttft_s = 0.0
        self._last: dict[int, float] = {}
        """When each branch last had tokens."""
        self._prompt_counted = False
        self._ended = False
        metrics.in_flight.inc()

    def placed(self, expected_ttft_s: float) -> None:
        """A worker group has it; with an estimate of the seconds from now to its first token, 0.0: none."""
        self._placed = time.perf_counter()
        self._expected_ttft_s = expected_ttft_s

    @_harmless
    def tokens(self, branch: int, count: int, num_cached_tokens: int | None) -> None:
        """``count`` new tokens of a branch have come at once; they share the time since those before."""
        if num_cached_tokens is not None:
            self._metrics.cached_tokens.inc(num_cached_tokens)
        if count == 0:
            return
        now = time.perf_counter()
        if not self._last:
            self._first_tokens(now)
        last, self._last[branch] = self._last.get(branch), now
        self._metrics.tokens.add(count, None if last is None else (now - last) / count)

    def _first_tokens(self, now: float) -> None:
        self._count_prompt()
        self._metrics.time_to_first_token.observe(now - self._arrival)
        if self._expected_ttft_s > 0.0:
            self._metrics.ttft_ratio.observe((now - self._placed) / self._expected_ttft_s)

    def _count_prompt(self) -> None:
        if not self._prompt_counted:
            self._prompt_counted = True
            self._metrics.prompt_tokens.inc(self._num_prompt_tokens)

    @_harmless
    def end(self, reason: FinishReason) -> None:
        """The request is over; only the first call counts."""
        if self._ended:
            return
        self._ended = True
        self._metrics.in_flight.dec()
        self._metrics.ended(reason)
        self._metrics.e2e_latency.observe(time.perf_counter() - self._arrival)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._count_prompt()


class _Family:
    """One metric family in the making: its HELP and TYPE lines, and its series with their values."""

    def __init__(self) -> None:
        self.comments: dict[str, str] = {}
        self.values: dict[str, str] = {}

    def add(self, series: str, value: str) -> None:
        known = self.values.get(series)
        self.values[series] = value if known is None else repr(float(known) + float(value))

    def lines(self) -> Iterator[str]:
        yield from self.comments.values()
        for series, value in self.values.items():
            yield f"{series} {value}"


def merge_metrics(texts: Iterable[str]) -> str:
    """One valid exposition out of several processes' Prometheus texts (format 0.0.4, without timestamps).

    Each family appears once, with the first HELP and TYPE. A series that several texts have is added up, which is right
    for counters, histograms and gauges that count; other gauges must carry a label that tells the processes apart.
    The client library's ``_created`` series are left out.

    Works on lines: the client library's parser takes 20 times as long, seconds for a hundred worker groups.
    """
    families: dict[str, _Family] = {}
    for text in texts:
        name = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, word, name, _ = f"{line} ".split(" ", 3)
                families.setdefault(name, _Family()).comments.setdefault(word, line)
            elif line and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                sample = series.partition("{")[0]
                if not sample.startswith(name) or sample.removeprefix(name) not in _SAMPLE_SUFFIXES:
                    name = sample  # a family without TYPE
                families.setdefault(name, _Family()).add(series, value)
    kept = (family for name, family in families.items() if not name.endswith("_created"))
    return "".join(f"{line}\n" for family in kept for line in family.lines())
