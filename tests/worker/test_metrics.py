"""A worker group's metrics: parsed by Prometheus' own parser, with the meanings that vLLM gave the names."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

from prometheus_client.parser import text_string_to_metric_families

from octavo.worker.admission import Bound
from octavo.worker.engine import Engine
from octavo.worker.messages import Branch, Request, SamplingParams, SequenceUpdate
from octavo.worker.metrics import metrics_text
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.sampling_row import SamplingRow, StepResult
from octavo.worker.scheduler import Scheduler, SchedulerCounters, SchedulerLimits
from octavo.worker.step_plan import StepPlan


class Model:
    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        step: Future[StepResult] = Future()
        step.set_result(StepResult([0] * len(rows)))
        return step


def an_engine() -> Engine:
    """8 blocks of 4 tokens, room for one sequence."""
    scheduler = Scheduler(SchedulerLimits(8, 4, 1, 64, 32), RoutingHasher(bytes(16), 4))
    return Engine(scheduler, Model(), clock=lambda: 0.0, emit=lambda gateway, update: None)


def submit(engine: Engine, name: str, num_tokens: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    engine.submit(Request(name, "g", "model", tuple(range(num_tokens)), b"", params))


def samples(engine: Engine, num_refused: Mapping[Bound, int] | None = None) -> dict[str, float]:
    """Sample name, with the reason where it has one → value."""
    result = {}
    for family in text_string_to_metric_families(metrics_text(engine, 'a "model"', "group 1", num_refused or {})):
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
    assert values.pop("octavo_cache_config_info/4/True/8") == 1
    assert sum(values.values()) == 8


def test_gauges_are_the_present() -> None:
    engine = an_engine()
    submit(engine, "running", 12, 3)
    submit(engine, "waiting", 3, 2)
    engine.step()
    values = samples(engine)
    assert values["octavo_num_requests_running"] == 1
    assert values["octavo_num_requests_waiting"] == 1
    assert values["octavo_num_requests_queued"] == 1
    assert values["octavo_num_queued_prompt_tokens"] == 3
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
    assert finished == {"stop": 0, "length": 2, "abort": 1, "timeout": 0, "error": 1, "overloaded": 0}


def test_what_the_scheduler_counts_is_shown() -> None:
    engine = an_engine()
    engine.scheduler.counters = SchedulerCounters(
        num_preemptions=1,
        num_recomputed_tokens=2,
        num_queried_prompt_tokens=3,
        num_cached_prompt_tokens=4,
        num_forks=5,
        num_copied_blocks=6,
        num_prefix_waits=7,
    )
    values = samples(engine)
    names = ("num_preemptions", "recomputed_tokens", "prefix_cache_queries", "prefix_cache_hits")
    names += ("forks", "copied_blocks", "prefix_waits")
    assert [values[f"octavo_{name}_total"] for name in names] == [1, 2, 3, 4, 5, 6, 7]


def test_blocks_kept_for_growth_are_shown() -> None:
    engine = an_engine()
    for name in ("first", "second"):
        submit(engine, name, 4, 12)
        while engine.step():
            pass
    submit(engine, "third", 4, 12)
    engine.step()
    kept = engine.scheduler.num_head_room_blocks
    assert kept > 0
    assert samples(engine)["octavo_kv_cache_head_room_blocks"] == kept


def test_requests_turned_away_are_counted_by_the_bound_that_they_met() -> None:
    values = samples(an_engine(), {Bound.TOKENS: 3})
    assert values["octavo_requests_refused_total/max_queued_tokens"] == 3
    assert values["octavo_requests_refused_total/max_queued_requests"] == 0


def test_branches_of_a_prompt_are_forks_that_copy_the_block_they_write_into() -> None:
    scheduler = Scheduler(SchedulerLimits(16, 4, 4, 64, 32), RoutingHasher(bytes(16), 4))
    engine = Engine(scheduler, Model(), clock=lambda: 0.0, emit=lambda gateway, update: None)
    branches = tuple(Branch(index) for index in range(3))
    params = SamplingParams(max_tokens=2, seed=0)
    engine.submit(Request("r", "g", "model", tuple(range(6)), b"", params, branches=branches))
    while engine.step():
        pass
    values = samples(engine)
    assert values["octavo_forks_total"] == 2
    assert values["octavo_copied_blocks_total"] >= 2
    assert values["octavo_engine_computed_tokens_total"] == 6 + 3


def test_a_request_s_time_is_told_by_its_phases() -> None:
    now = [0.0]
    told: list[SequenceUpdate] = []
    scheduler = Scheduler(SchedulerLimits(8, 4, 1, 64, 32), RoutingHasher(bytes(16), 4))
    engine = Engine(scheduler, Model(), clock=lambda: now[0], emit=lambda gateway, update: told.append(update))
    submit(engine, "first", 6, 3)
    submit(engine, "second", 6, 1)
    for now[0] in (2.0, 5.0, 9.0, 14.0, 20.0, 27.0):
        engine.step()
    values = samples(engine)
    # A step ends when it is launched: the first tokens come at 2, 5 and 9 s; the second prompt shares a block of 4.
    assert [update.phases for update in told] == [(2.0, 0.0), None, None, (14.0, 0.0)]
    assert values["octavo_engine_queue_time_seconds_sum"] == 2.0 + 14.0
    assert values["octavo_engine_prefill_time_seconds_count"] == 2
    assert values["octavo_engine_decode_time_seconds_sum"] == 7.0
    assert values["octavo_engine_step_tokens_sum"] == values["octavo_engine_computed_tokens_total"] == 6 + 1 + 1 + 2
    assert values["octavo_engine_step_tokens_bucket/1.0"] == 2
