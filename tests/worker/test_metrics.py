"""A worker group's metrics: parsed by Prometheus' own parser, with the meanings that vLLM gave the names."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from octavo.worker.engine import Engine
from octavo.worker.messages import Request, SamplingParams
from octavo.worker.metrics import metrics_text
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.sampling_row import SamplingRow
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.step_plan import StepPlan


class Model:
    def execute(self, plan: StepPlan, rows: list[SamplingRow]) -> list[int]:
        return [0] * len(rows)


def an_engine() -> Engine:
    """8 blocks of 4 tokens, room for one sequence."""
    scheduler = Scheduler(SchedulerLimits(8, 4, 1, 64, 32), RoutingHasher(bytes(16), 4))
    return Engine(scheduler, Model(), clock=lambda: 0.0, emit=lambda gateway, update: None)


def submit(engine: Engine, name: str, num_tokens: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    engine.submit(Request(name, "g", "model", tuple(range(num_tokens)), (), params))


def samples(engine: Engine) -> dict[str, float]:
    """Sample name, with the reason where it has one → value."""
    result = {}
    for family in text_string_to_metric_families(metrics_text(engine, 'a "model"', "group 1")):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == 'a "model"'
            assert labels.pop("group") == "group 1"
            result["/".join([sample.name, *labels.values()])] = sample.value
    return result


def test_an_idle_engine_has_all_metrics() -> None:
    values = samples(an_engine())
    assert all(name.startswith("octavo_") for name in values)
    assert values["octavo_kv_cache_blocks"] == 8
    assert sum(values.values()) == 8


def test_gauges_are_the_present() -> None:
    engine = an_engine()
    submit(engine, "running", 12, 3)
    submit(engine, "waiting", 3, 2)
    engine.step()
    values = samples(engine)
    assert values["octavo_num_requests_running"] == 1
    assert values["octavo_num_requests_waiting"] == 1
    assert values["octavo_kv_cache_usage_perc"] == 3 / 8
    while engine.step():
        pass
    values = samples(engine)
    assert values["octavo_num_requests_running"] == values["octavo_kv_cache_usage_perc"] == 0
    assert values["octavo_kv_cache_cached_blocks"] == 3 + 1


def test_counters_are_totals_since_the_start() -> None:
    engine = an_engine()
    for name in ("first", "second"):
        submit(engine, name, 9, 2)
        while engine.step():
            pass
    submit(engine, "aborted", 9, 2)
    engine.abort("aborted")
    submit(engine, "too long", 90, 2)
    values = samples(engine)
    assert values["octavo_prefix_cache_queries_total"] == 18
    assert values["octavo_prefix_cache_hits_total"] == 8
    assert values["octavo_engine_prompt_tokens_total"] == 27
    assert values["octavo_engine_generation_tokens_total"] == 4
    assert values["octavo_engine_computed_tokens_total"] == 9 + 1 + 1 + 1
    assert values["octavo_engine_steps_total"] == 4
    assert values["octavo_num_preemptions_total"] == values["octavo_recomputed_tokens_total"] == 0
    finished = {
        name.split("/")[1]: value
        for name, value in values.items()
        if name.startswith("octavo_engine_sequences_finished")
    }
    assert finished == {"stop": 0, "length": 2, "abort": 1, "timeout": 0, "error": 1}


def test_preemptions_and_what_they_cost_are_counted() -> None:
    scheduler = Scheduler(SchedulerLimits(4, 4, 2, 64, 16), RoutingHasher(bytes(16), 4))
    engine = Engine(scheduler, Model(), clock=lambda: 0.0, emit=lambda gateway, update: None)
    submit(engine, "a", 7, 6)
    engine.submit(Request("b", "g", "model", tuple(range(50, 57)), (), SamplingParams(max_tokens=6, seed=0)))
    while engine.step():
        pass
    values = samples(engine)
    assert values["octavo_num_preemptions_total"] == 1
    assert values["octavo_recomputed_tokens_total"] == 8
