"""The router's metrics in Prometheus text format, read from its books at the moment they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .admission import Admission
from .counters import Counters
from .index import PrefixIndex
from .pool import Pool
from .predictions import Predictions

_PREFIX = "octavo_router_"


def render_metrics(
    counters: Counters, index: PrefixIndex, predictions: Predictions, pools: Iterable[Pool], admission: Admission
) -> str:
    """All metrics of one router; a registry of its own, so that several routers live in one process."""
    registry = CollectorRegistry()
    registry.register(_Snapshot([*_from_counters(counters), *_from_state(index, predictions, pools, admission)]))
    return generate_latest(registry).decode()


class _Snapshot(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _from_counters(counters: Counters) -> Iterator[Metric]:
    decisions = CounterMetricFamily(f"{_PREFIX}decisions", "Answered queries.", labels=["model", "reason"])
    for (model, reason), count in counters.decisions.items():
        decisions.add_metric([model, reason], count)
    yield decisions
    yield _labelled(
        "prompt_tokens", "Prompt tokens of requests whose prefill was reported.", "model", counters.prompt_tokens
    )
    yield _labelled(
        "expected_cached_tokens", "Cached tokens expected of those.", "model", counters.expected_cached_tokens
    )
    yield _labelled("actual_cached_tokens", "Cached tokens found by those.", "model", counters.actual_cached_tokens)
    yield _labelled(
        "expected_ttft_seconds",
        "Expected times to first token, of requests that have it.",
        "model",
        counters.expected_ttft_s,
    )
    yield _labelled("actual_ttft_seconds", "Times to first token of those.", "model", counters.actual_ttft_s)
    yield from _histograms(counters)
    yield _labelled("predictions", "Prefills by how they compare with what was expected.", "outcome", counters.outcomes)
    yield _labelled("failures", "Unexpected errors; the log says more.", "during", counters.failures)
    yield from _totals(counters)


def _histograms(counters: Counters) -> Iterator[Metric]:
    for name, text, histogram in (
        ("ttft_error_seconds", "How far expected and actual times to first token were apart.", counters.ttft_error),
        ("queue_time_seconds", "Time that requests waited in the router before a group got them.", counters.queue_time),
        ("event_lag_seconds", "How long the oldest news of a report had waited at the group.", counters.event_lag),
    ):
        yield HistogramMetricFamily(_PREFIX + name, text, buckets=histogram.buckets(), sum_value=histogram.sum)


def _totals(counters: Counters) -> Iterator[Metric]:
    for name, text, value in (
        ("blocks_stored", "Blocks stored, as told by events.", counters.blocks_stored),
        ("blocks_removed", "Blocks removed, as told by events.", counters.blocks_removed),
        ("caches_cleared", "Caches cleared, as told by events.", counters.caches_cleared),
        ("snapshots", "Snapshots applied.", counters.snapshots),
        ("event_messages", "Messages of events received.", counters.event_messages),
        (
            "event_messages_ignored",
            "Messages of events that were repeated, late or void.",
            counters.event_messages_ignored,
        ),
        (
            "event_messages_malformed",
            "Messages of events that were left out because something in them cannot be.",
            counters.event_messages_malformed,
        ),
        ("event_gaps", "Messages of events found missing.", counters.event_gaps),
        ("holes", "Blocks stored behind an unknown parent.", counters.holes),
        ("reports_malformed", "Reports with impossible numbers, ignored.", counters.reports_malformed),
        ("reports_fenced", "Reports of void generations.", counters.reports_fenced),
        ("groups_lost", "Groups dropped after silence or a restart.", counters.groups_lost),
        (
            "reservations_expired",
            "Reservations of requests that were not received, or not computed, in time.",
            counters.reservations_expired,
        ),
    ):
        yield CounterMetricFamily(_PREFIX + name, text, value=value)


def _from_state(
    index: PrefixIndex, predictions: Predictions, pools: Iterable[Pool], admission: Admission
) -> Iterator[Metric]:
    yield from _from_pools(pools, admission)
    for name, text, value in (
        ("running_requests", "Requests placed and not over.", admission.num_running),
        ("index_entries", "Blocks in the prefix index.", index.num_entries),
        ("index_bytes", "Memory of the prefix index.", index.num_bytes),
        ("index_stride", "One of so many blocks is indexed.", index.stride),
        ("predicted_blocks", "Blocks assumed and not yet confirmed.", predictions.num_blocks),
    ):
        yield GaugeMetricFamily(_PREFIX + name, text, value=value)


def _from_pools(pools: Iterable[Pool], admission: Admission) -> Iterator[Metric]:
    groups = _gauge("groups", "Live groups by knowledge.", "model", "knowledge")
    reservations = _gauge("reservations", "Requests not yet computed.", "model")
    imbalance = _gauge("imbalance", "Prefill work given lately to the busiest group, by the mean.", "model")
    utilisation = _gauge("utilisation", "Prefill work that came lately, as a share of the groups' time.", "model")
    queued = _gauge("queued_requests", "Requests that wait in the router.", "model")
    states = _gauge("group_knowledge", "1 for how each group is known.", "model", "group", "knowledge")
    for pool in pools:
        queued.add_metric([pool.model], admission.num_waiting_for(pool.model))
        for group in pool.members:
            states.add_metric([pool.model, group.name, group.knowledge.state.value], 1)
        imbalance.add_metric([pool.model], pool.imbalance)
        utilisation.add_metric([pool.model], pool.latest_utilisation)
        for state, count in Counter(group.knowledge.state.value for group in pool.groups.values()).items():
            groups.add_metric([pool.model, state], count)
        reservations.add_metric([pool.model], sum(len(group.reservations) for group in pool.groups.values()))
    yield from (groups, reservations, queued, states, imbalance, utilisation)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, text, labels=labels)


def _labelled(name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, text, labels=[label])
    for key, count in counts.items():
        family.add_metric([key], count)
    return family
