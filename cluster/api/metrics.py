"""Prometheus metrics of one model in one gateway, and the merging of several processes' texts.

Names end as vLLM's do and mean the same, seen from the gateway: times include tokenization, routing and transport.
A request is one prompt, whatever the number of its outputs: it counts once in ``request_success``, with the reason of
the output that ended last, and its prompt's tokens count once. What is refused before a worker group is asked for is no
request. One that was given up while it waited has ended as any other that was: abort.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ParamSpec

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from ...worker.histogram import REQUEST_SECONDS, Histogram
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
_COUNT_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_N_BUCKETS = (1, 2, 5, 10, 20)
_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
_LABELS = ("model_name", "gateway")
_SAMPLE_SUFFIXES = frozenset(("", "_bucket", "_sum", "_count"))


P = ParamSpec("P")
_LOGGER = logging.getLogger(__name__)


def harmless(measure: Callable[P, None]) -> Callable[P, None]:
    """``measure``, but an exception of it is logged."""

    @functools.wraps(measure)
    def harmless(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            measure(*args, **kwargs)
        except Exception:
            _LOGGER.exception("a metric could not be written")

    return harmless


class GatewayMetrics:
    """The metrics of one model in a registry of their own; the label ``gateway`` tells gateways apart."""

    def __init__(self, model: str, gateway: str) -> None:
        self.registry = CollectorRegistry()
        self._own = (model, gateway)
        self._labels = dict(zip(_LABELS, self._own, strict=True))
        self._histograms: list[tuple[str, str, Histogram]] = []
        """(name, help, the numbers)."""
        self.tokens = TokenMetrics(self._labels, _ITL_BUCKETS)
        self.registry.register(self.tokens)
        latency = self.tokens.latency_s
        self._histograms.append(("octavo_inter_token_latency_seconds", "Between two tokens of one output.", latency))
        self.time_to_first_token = self._histogram(
            "octavo_time_to_first_token_seconds", "From the request's arrival to its first token.", _TTFT_BUCKETS
        )
        self.e2e_latency = self._histogram(
            "octavo_e2e_request_latency_seconds", "From the request's arrival to its last token.", REQUEST_SECONDS
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
        self._add_phases()
        self._add_sizes()
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

    def _add_phases(self) -> None:
        self.queue_time = self._histogram(
            "octavo_request_queue_time_seconds", "Waited in the router and in the worker group.", REQUEST_SECONDS
        )
        self.prefill_time = self._histogram(
            "octavo_request_prefill_time_seconds",
            "From the first step that computed a part of the prompt to the first token.",
            REQUEST_SECONDS,
        )
        self.decode_time = self._histogram(
            "octavo_request_decode_time_seconds", "From the first token to the last one.", REQUEST_SECONDS
        )
        self.inference_time = self._histogram(
            "octavo_request_inference_time_seconds", "Prefill and decode.", REQUEST_SECONDS
        )
        self.time_per_output_token = self._histogram(
            "octavo_request_time_per_output_token_seconds",
            "Mean over a request, without its first token.",
            _ITL_BUCKETS,
        )

    def _add_sizes(self) -> None:
        """Of requests that had output."""
        self.request_prompt_tokens = self._histogram("octavo_request_prompt_tokens", "Of a prompt.", _COUNT_BUCKETS)
        self.request_computed_tokens = self._histogram(
            "octavo_request_prefill_kv_computed_tokens", "Of a prompt, without those found cached.", _COUNT_BUCKETS
        )
        self.request_generation_tokens = self._histogram(
            "octavo_request_generation_tokens", "Of all outputs of a request.", _COUNT_BUCKETS
        )
        self.request_longest_output = self._histogram(
            "octavo_request_max_num_generation_tokens", "Of a request's longest output.", _COUNT_BUCKETS
        )
        self.request_n = self._histogram("octavo_request_params_n", "Outputs asked for.", _N_BUCKETS)
        self.request_max_tokens = self._histogram(
            "octavo_request_params_max_tokens", "Limit of each output.", _COUNT_BUCKETS
        )

    def ended(self, reason: FinishReason) -> None:
        self._success.labels(*self._own, reason.value).inc()

    def text(self) -> str:
        """Prometheus text exposition, format 0.0.4."""
        told = [numbers.text(name, help_text, self._labels) for name, help_text, numbers in self._histograms]
        return "".join([generate_latest(self.registry).decode(), *told])

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(name, help_text, _LABELS, registry=self.registry).labels(*self._own)

    def _histogram(self, name: str, help_text: str, bounds: Sequence[float]) -> Histogram:
        histogram = Histogram(bounds)
        self._histograms.append((name, help_text, histogram))
        return histogram


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
        for line in text.split("\n"):  # a model's name may hold other ends of lines
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
