"""Overview: what ``octavo top`` shows, as plain numbers: what a cluster does now, by models, groups and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .samples import Window


@dataclass(frozen=True, slots=True)
class Latency:
    """Of what came in the window; None where nothing did."""

    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class Rank:
    rank: str
    cpu_cores: float
    """Processor time in a second."""
    resident_bytes: float | None
    gpu_memory_used_bytes: float | None
    gpu_memory_total_bytes: float | None
    gpu_power_watts: float | None
    gpu_utilization: float | None
    """0 to 1; the GPU's numbers are None on CPUs."""


@dataclass(frozen=True, slots=True)
class Group:
    group: str
    model: str
    knowledge: str | None
    """How well the routers know what it has cached: exact, stale or blind; None where they do not know the group."""
    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of KV blocks that sequences hold, 0 to 1."""
    num_blocks: int
    hit_rate: float | None
    """Prompt tokens that were found cached, as a share; None where there was no prompt."""
    generated_tokens_per_s: float
    computed_tokens_per_s: float
    """Of prompts and outputs."""
    queue: Latency
    prefill: Latency
    preemptions_per_s: float
    ranks: Sequence[Rank]


@dataclass(frozen=True, slots=True)
class Model:
    model: str
    num_in_flight: int
    """At the gateways."""
    num_queued: int
    """In the routers, for a group with room."""
    requests_per_s: float
    """Ended ones."""
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    ttft: Latency
    itl: Latency
    e2e: Latency


@dataclass(frozen=True, slots=True)
class Overview:
    seconds: float
    """Length of the window that rates and latencies are of."""
    models: Sequence[Model]
    groups: Sequence[Group]
    decisions_per_s: dict[str, float]
    """Of the routers, by reason."""
    failovers_per_s: float
    fallback_routes_per_s: float


def overview(window: Window, seconds: float) -> Overview:
    now = window.now
    reasons = sorted({labels["reason"] for labels, _ in now.series("octavo_router_decisions_total")})
    names = sorted({labels["model_name"] for labels, _ in now.series("octavo_gateway_requests_in_flight")})
    return Overview(
        seconds,
        [_model(window, name) for name in names],
        [
            _group(window, labels["model_name"], labels["group"])
            for labels, _ in sorted(now.series("octavo_kv_cache_blocks"), key=lambda each: sorted(each[0].values()))
        ],
        {reason: window.rate("octavo_router_decisions_total", reason=reason) for reason in reasons},
        window.rate("octavo_gateway_failovers_total"),
        window.rate("octavo_gateway_fallback_routes_total"),
    )


def _model(window: Window, name: str) -> Model:
    now = window.now
    return Model(
        name,
        int(now.total("octavo_gateway_requests_in_flight", model_name=name)),
        int(now.total("octavo_router_queued_requests", model=name)),
        window.rate("octavo_request_success_total", model_name=name),
        window.rate("octavo_prompt_tokens_total", model_name=name),
        window.rate("octavo_generation_tokens_total", model_name=name),
        _latency(window, "octavo_time_to_first_token_seconds", model_name=name),
        _latency(window, "octavo_inter_token_latency_seconds", model_name=name),
        _latency(window, "octavo_e2e_request_latency_seconds", model_name=name),
    )


def _group(window: Window, model: str, group: str) -> Group:
    now = window.now
    known = [labels["knowledge"] for labels, _ in now.series("octavo_router_group_knowledge", group=group)]
    queried = window.rate("octavo_prefix_cache_queries_total", group=group)
    ranks = sorted(labels["rank"] for labels, _ in now.series("octavo_process_threads", group=group))
    return Group(
        group,
        model,
        known[0] if known else None,
        int(now.total("octavo_num_requests_running", group=group)),
        int(now.total("octavo_num_requests_waiting", group=group)),
        now.total("octavo_kv_cache_usage_perc", group=group),
        int(now.total("octavo_kv_cache_blocks", group=group)),
        window.rate("octavo_prefix_cache_hits_total", group=group) / queried if queried else None,
        window.rate("octavo_engine_generation_tokens_total", group=group),
        window.rate("octavo_engine_computed_tokens_total", group=group),
        _latency(window, "octavo_engine_queue_time_seconds", group=group),
        _latency(window, "octavo_engine_prefill_time_seconds", group=group),
        window.rate("octavo_num_preemptions_total", group=group),
        [_rank(window, group, rank) for rank in sorted(ranks, key=int)],
    )


def _rank(window: Window, group: str, rank: str) -> Rank:
    which, now = {"group": group, "rank": rank}, window.now
    return Rank(
        rank,
        window.rate("octavo_process_cpu_seconds_total", **which),
        now.value("octavo_process_resident_memory_bytes", **which),
        now.value("octavo_gpu_memory_used_bytes", **which),
        now.value("octavo_gpu_memory_total_bytes", **which),
        now.value("octavo_gpu_power_watts", **which),
        now.value("octavo_gpu_utilization_ratio", **which),
    )


def _latency(window: Window, name: str, **wanted: str) -> Latency:
    return Latency(window.quantile(name, 0.5, **wanted), window.quantile(name, 0.99, **wanted))
