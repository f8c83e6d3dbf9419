"""What is lost on the way, and who dies, costs a part of the hits and no request."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from octavo.router.knowledge import KnowledgeState
from octavo.router.simulator.faults import EventChannel, EventFaults, Faults
from octavo.router.simulator.metrics import Result
from octavo.router.simulator.policies import RouterPolicy
from octavo.router.simulator.simulation import Simulation
from octavo.router.simulator.traces import Trace
from octavo.worker.errors import ConfigurationError
from octavo.worker.messages import GroupReport, KVEvents


def report_with(*numbers: int) -> GroupReport:
    events = tuple([KVEvents(1, number, ()) for number in numbers])
    return GroupReport("", "a", 1, 4, 10, 10, 8, 0, 0, 0, 0.0, 0.0, False, (), events)


def carried(faults: EventFaults, *reports: GroupReport) -> list[list[int]]:
    channel = EventChannel(faults, random.Random(0))
    return [[message.sequence_number for message in channel.carry(report).events] for report in reports]


def test_messages_are_lost_repeated_and_overtaken() -> None:
    reports = (report_with(0, 1, 2), report_with(3), report_with())
    assert carried(EventFaults(), *reports) == [[0, 1, 2], [3], []]
    assert carried(EventFaults(loss=1.0), *reports) == [[], [], []]
    assert carried(EventFaults(duplicate=1.0), *reports) == [[0, 0, 1, 1, 2, 2], [3, 3], []]
    assert carried(EventFaults(reorder=1.0), *reports) == [[1, 0], [3, 2], []]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_an_impossible_share(share: float) -> None:
    with pytest.raises(ConfigurationError, match="--event-reorder: must be from 0 to 1, got"):
        EventFaults(reorder=share).check()


@pytest.fixture
def trace(make_trace: Callable[..., Trace]) -> Trace:
    return make_trace(random.Random(7), 150)


def assert_all_served(result: Result, trace: Trace) -> None:
    assert result.num_refused == 0
    assert all(outcome.is_finished for outcome in result.outcomes)
    assert [outcome.num_output_tokens for outcome in result.outcomes] == [r.num_output_tokens for r in trace.requests]


def states(simulation: Simulation) -> list[KnowledgeState]:
    assert isinstance(simulation.policy, RouterPolicy)
    pools = simulation.policy.router.pools.values()
    return [group.knowledge.state for pool in pools for group in pool.groups.values()]


def test_lost_late_and_repeated_events_are_made_good_by_snapshots(
    trace: Trace, new_simulation: Callable[..., Simulation]
) -> None:
    simulation = new_simulation(trace, faults=Faults(EventFaults(0.1, 0.1, 0.1)))
    assert_all_served(simulation.run(), trace)
    assert isinstance(simulation.policy, RouterPolicy)
    counters = simulation.policy.router.counters
    assert counters.event_gaps > 10
    assert counters.event_messages_ignored > 10
    assert counters.snapshots > 2
    simulation.policy.router.check()


def test_one_percent_of_each_costs_hardly_a_hit(
    make_trace: Callable[..., Trace], new_simulation: Callable[..., Simulation]
) -> None:
    trace = make_trace(random.Random(10), 150, rate=5.0)
    with_faults, exact = (
        new_simulation(trace, num_groups=4, faults=Faults(events)).run().block_hit_rate
        for events in (EventFaults(0.01, 0.01, 0.01), EventFaults())
    )
    assert with_faults == pytest.approx(exact, abs=0.02)


def test_another_router_knows_all_groups_again_and_no_request_is_lost(
    trace: Trace, new_simulation: Callable[..., Simulation]
) -> None:
    middle_s = trace.requests[len(trace.requests) // 2].arrival_s
    simulation = new_simulation(trace, faults=Faults(router_deaths_s=(middle_s,)))
    first, known_at_s = simulation.policy, None
    for now in simulation.steps():
        is_another = simulation.policy is not first and known_at_s is None
        if is_another and states(simulation) == [KnowledgeState.EXACT] * 2:
            known_at_s = now
    assert known_at_s is not None
    assert known_at_s < middle_s + 1.5, "a report comes within a second, and the snapshot with the next one"
    assert_all_served(simulation.summary(), trace)
    undisturbed = new_simulation(trace).run()
    assert simulation.summary().block_hit_rate > undisturbed.block_hit_rate - 0.05


def test_requests_of_a_group_that_dies_go_on_elsewhere(
    make_trace: Callable[..., Trace], new_simulation: Callable[..., Simulation]
) -> None:
    trace = make_trace(random.Random(8), 150, rate=60.0)
    time_s = trace.requests[60].arrival_s
    simulation = new_simulation(trace, faults=Faults(group_deaths=((time_s, "group-1"),), group_start_s=0.5))
    result = simulation.run()
    assert result.num_moved > 0
    assert_all_served(result, trace)
    assert simulation.lines["group-1"].group.generation == 3
    assert any(simulation.lines["group-1"].group.engine.counters.finished.values()), "it serves again"


def test_router_and_group_die_together(
    make_trace: Callable[..., Trace], new_simulation: Callable[..., Simulation]
) -> None:
    trace = make_trace(random.Random(9), 150, rate=60.0)
    time_s = trace.requests[60].arrival_s
    faults = Faults(
        EventFaults(0.01, 0.01, 0.01), router_deaths_s=(time_s,), group_deaths=((time_s, "group-0"),), group_start_s=0.5
    )
    assert_all_served(new_simulation(trace, faults=faults).run(), trace)
