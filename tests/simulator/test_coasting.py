"""Skipping over steps that only decode gives, to the last bit, what stepping gives."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from octavo.router.counters import Counters
from octavo.router.simulator.metrics import Result
from octavo.router.simulator.policies import RouterPolicy
from octavo.router.simulator.prompts import Prompts
from octavo.router.simulator.simulation import Simulation
from octavo.router.simulator.traces import Trace
from octavo.worker.histogram import Histogram
from octavo.worker.routing_hash import RoutingHasher


def fingerprint(simulation: Simulation) -> list[Any]:
    """What is left behind: in every engine, in its cache and its speeds, and in the router."""
    groups = [line.group.engine for line in simulation.lines.values()]
    left: list[Any] = [
        (
            dataclasses.asdict(engine.counters),
            dataclasses.asdict(engine.scheduler.counters),
            engine.scheduler.cache.snapshot(),
            engine.scheduler.num_coming_blocks,
            engine.speed.decode_step_s,
            engine.speed.prefill_tokens_per_s,
        )
        for engine in groups
    ]
    policy = simulation.policy
    if isinstance(policy, RouterPolicy):
        left += [counted(policy.router.counters), policy.router.explain(1000)]
    return left


def counted(counters: Counters) -> dict[str, Any]:
    """Without what differs since the events of several steps come in one message."""
    values = {field.name: getattr(counters, field.name) for field in dataclasses.fields(counters)}
    del values["event_messages"], values["event_lag"]
    return {name: value.buckets() if isinstance(value, Histogram) else value for name, value in values.items()}


def comparable(result: Result) -> Result:
    """Without what is summed up in another order."""
    return dataclasses.replace(result, utilisation=round(result.utilisation, 9), inter_token=None)  # type: ignore[arg-type]


CLUSTERS = {
    "room for all": {},
    "scarce blocks": {"num_blocks": 70, "max_num_batched_tokens": 16},
    "few seats": {"max_num_seqs": 2},
    "long reports": {"report_pause_s": 0.3, "report_delay_s": 0.05},
    "large blocks": {"block_size": 16, "num_blocks": 40},
    "target": {"target_itl_s": 0.02, "max_num_batched_tokens": 64},
}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_coasting_equals_stepping(
    make_trace: Callable[..., Trace], new_simulation: Callable[..., Simulation], cluster: str
) -> None:
    num_coasted = 0
    for seed in range(2):
        trace = make_trace(random.Random(seed), 50)
        stepping = new_simulation(trace, coasts=False, **CLUSTERS[cluster])
        coasting = new_simulation(trace, coasts=True, **CLUSTERS[cluster])
        stepped, coasted = stepping.run(), coasting.run()
        assert comparable(coasted) == comparable(stepped)
        assert coasted.inter_token == pytest.approx(stepped.inter_token)
        assert fingerprint(coasting) == fingerprint(stepping)
        num_coasted += sum(line.group.num_coasted for line in coasting.lines.values())
        for line in coasting.lines.values():
            line.group.engine.check()
    assert num_coasted > 20, "nothing was skipped, so nothing was shown"


@pytest.mark.parametrize("target_itl_s", [None, 0.02])
def test_a_group_reports_the_same_at_any_time(
    make_trace: Callable[..., Trace], new_simulation: Callable[..., Simulation], target_itl_s: float | None
) -> None:
    trace = make_trace(random.Random(2), 40)
    prompts = Prompts(RoutingHasher(bytes(16), 4), trace.block_size)
    simulations = [new_simulation(trace, coasts=coasts, target_itl_s=target_itl_s) for coasts in (False, True)]
    groups = stepping, coasting = [simulation.lines["group-0"].group for simulation in simulations]
    num_prefilling = 0
    for number, now in arrivals_and_reports(trace, random.Random(3)):
        for group in groups:
            while group.wakes_at_s is not None and group.wakes_at_s <= now:
                group.wake()
            if number is not None:
                group.submit(prompts.request(number, trace.requests[number]), now)
        if number is None:
            stepped, coasted = [group.take_report(now) for group in groups]
            assert coasted == stepped, f"at {now} s"
            assert coasting.engine.counters == stepping.engine.counters, f"at {now} s"
            num_prefilling += coasting.engine.num_prefill_tokens_under_way > 0
            for group in groups:
                group.report_arrived(stepped, wants_snapshot=False, now=now)
    assert coasting.num_coasted > 20, "nothing was skipped, so nothing was shown"
    assert num_prefilling > 5, "no prompt was under way when the groups reported"


def arrivals_and_reports(trace: Trace, rng: random.Random) -> list[tuple[int | None, float]]:
    """(Number of the request that arrives, or None for a report; time in seconds), by time."""
    arrivals: list[tuple[int | None, float]] = [(number, r.arrival_s) for number, r in enumerate(trace.requests)]
    reports = [(None, rng.uniform(0.0, trace.requests[-1].arrival_s + 2.0)) for _ in range(300)]
    return sorted([*arrivals, *reports], key=lambda each: each[1])


def test_the_tests_meet_scarcity(make_trace: Callable[..., Trace], new_simulation: Callable[..., Simulation]) -> None:
    simulation = new_simulation(make_trace(random.Random(0), 60), **CLUSTERS["scarce blocks"])
    result = simulation.run()
    removed = [line.group.engine.scheduler.cache.num_blocks for line in simulation.lines.values()]
    assert result.num_preemptions > 0
    assert max(removed) <= 70
    assert isinstance(simulation.policy, RouterPolicy)
    assert simulation.policy.router.counters.blocks_removed > 0


def test_books_balance_at_any_time(make_trace: Callable[..., Trace], new_simulation: Callable[..., Simulation]) -> None:
    simulation = new_simulation(make_trace(random.Random(1), 40), **CLUSTERS["scarce blocks"])
    for number, _ in enumerate(simulation.steps()):
        if number % 50 == 0:
            for line in simulation.lines.values():
                line.group.engine.check()
            assert isinstance(simulation.policy, RouterPolicy)
            simulation.policy.router.check()
