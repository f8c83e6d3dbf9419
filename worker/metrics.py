"""A worker group's metrics in Prometheus text format; names and meanings follow vLLM's, prefixed ``octavo_``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .admission import Bound
from .engine import Engine, EngineCounters
from .process_metrics import render

_LABELS = ("model_name", "group")


def metrics_text(engine: Engine, model: str, group: str, num_refused: Mapping[Bound, int]) -> str:
    """All metrics of one worker group, as they are now; ``num_refused`` never came as far as the engine."""
    histograms = _histograms(engine.counters, {"model_name": model, "group": group})
    return "".join([render(_EngineCollector(engine, (model, group), num_refused)), *histograms])


def _histograms(counters: EngineCounters, labels: Mapping[str, str]) -> Iterator[str]:
    yield counters.step_tokens.text("octavo_engine_step_tokens", "Tokens that a step computed.", labels)
    yield counters.queue_s.text(
        "octavo_engine_queue_time_seconds",
        "From a request's receipt by the group to the first step that computed a part of it.",
        labels,
    )
    yield counters.prefill_s.text(
        "octavo_engine_prefill_time_seconds", "From that step to the request's first token.", labels
    )
    yield counters.decode_s.text(
        "octavo_engine_decode_time_seconds", "From a request's first token to its end.", labels
    )


class _EngineCollector(Collector):
    def __init__(self, engine: Engine, labels: tuple[str, str], num_refused: Mapping[Bound, int]) -> None:
        self._engine = engine
        self._labels = labels
        self._num_refused = num_refused

    def collect(self) -> Iterable[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield self._cache_config()
        finished = {reason.value: count for reason, count in self._engine.counters.finished.items()}
        yield self._counter_by(
            "octavo_engine_sequences_finished", "Sequences ended, by reason.", "finished_reason", finished
        )
        refused = {bound.value: self._num_refused.get(bound, 0) for bound in Bound}
        yield self._counter_by(
            "octavo_requests_refused", "Requests turned away, by the setting that bounds the queue.", "bound", refused
        )

    def _gauges(self) -> Iterator[Metric]:
        scheduler, speed = self._engine.scheduler, self._engine.speed
        pool = scheduler.pool
        used = pool.num_held_blocks / pool.num_blocks
        yield self._gauge("octavo_num_requests_running", "Sequences in the running batch.", scheduler.num_running)
        yield self._gauge("octavo_num_requests_waiting", "Sequences waiting for admission.", scheduler.num_waiting)
        yield self._gauge(
            "octavo_num_requests_queued",
            "Requests never admitted to the batch yet; --max-queued-requests bounds them.",
            scheduler.num_queued_requests,
        )
        yield self._gauge(
            "octavo_num_queued_prompt_tokens",
            "Tokens of their prompts; --max-queued-tokens bounds them.",
            scheduler.num_queued_tokens,
        )
        yield self._gauge("octavo_kv_cache_usage_perc", "Share of KV blocks held by sequences, 0 to 1.", used)
        yield self._gauge("octavo_kv_cache_blocks", "KV blocks of the pool.", pool.num_blocks)
        yield self._gauge(
            "octavo_kv_cache_cached_blocks", "Unused KV blocks that can still be reused.", pool.num_cached_blocks
        )
        yield self._gauge(
            "octavo_kv_cache_head_room_blocks",
            "Free KV blocks kept for the growth of running sequences.",
            scheduler.num_head_room_blocks,
        )
        yield self._gauge(
            "octavo_prefill_tokens_per_second", "Measured prefill rate, running mean.", speed.prefill_tokens_per_s
        )
        yield self._gauge("octavo_decode_step_seconds", "Measured decode step, running mean.", speed.decode_step_s)

    def _counters(self) -> Iterator[Metric]:
        engine, scheduler = self._engine.counters, self._engine.scheduler.counters
        yield self._counter(
            "octavo_prefix_cache_queries", "Prompt tokens looked up in the cache.", scheduler.num_queried_prompt_tokens
        )
        yield self._counter(
            "octavo_prefix_cache_hits", "Prompt tokens taken from the cache.", scheduler.num_cached_prompt_tokens
        )
        yield self._counter(
            "octavo_num_preemptions", "Sequences preempted for blocks or slots.", scheduler.num_preemptions
        )
        yield self._counter(
            "octavo_recomputed_tokens", "Tokens computed again after preemption.", scheduler.num_recomputed_tokens
        )
        yield self._counter(
            "octavo_prefix_waits",
            "Prompts that waited for another to compute what they share.",
            scheduler.num_prefix_waits,
        )
        yield self._counter("octavo_forks", "Branches that began on another's KV blocks.", scheduler.num_forks)
        yield self._counter(
            "octavo_copied_blocks",
            "KV blocks copied because a branch wrote into a shared one.",
            scheduler.num_copied_blocks,
        )
        yield self._counter("octavo_engine_steps", "Engine steps.", engine.num_steps)
        yield self._counter(
            "octavo_engine_prompt_tokens", "Prompt tokens of accepted requests.", engine.num_prompt_tokens
        )
        yield self._counter("octavo_engine_generation_tokens", "Tokens sampled.", engine.num_generation_tokens)
        yield self._counter("octavo_engine_computed_tokens", "Tokens computed by steps.", engine.num_computed_tokens)
        yield self._counter(
            "octavo_nan_logits_rows", "Rows of logits that held NaN, or no finite number.", engine.num_nan_rows
        )

    def _cache_config(self) -> Metric:
        """A constant 1 whose labels say how the KV cache is made, as vLLM has it."""
        limits = self._engine.scheduler.limits
        config = {
            "block_size": str(limits.block_size),
            "num_gpu_blocks": str(limits.num_blocks),
            "enable_prefix_caching": str(limits.enable_prefix_caching),
        }
        family = GaugeMetricFamily("octavo_cache_config_info", "How the KV cache is made.", labels=(*_LABELS, *config))
        family.add_metric((*self._labels, *config.values()), 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter_by(self, name: str, text: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=(*_LABELS, label))
        for of, value in values.items():
            family.add_metric((*self._labels, of), value)
        return family
