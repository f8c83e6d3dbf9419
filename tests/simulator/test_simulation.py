"""What a cluster does with a trace, followed by hand."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from octavo.router.simulator.policies import RouterPolicy
from octavo.router.simulator.simulation import Simulation
from octavo.router.simulator.traces import Trace, TraceRequest
from octavo.worker.errors import ConfigurationError


def trace_of(*requests: TraceRequest) -> Trace:
    return Trace("by hand", 8, requests)


def test_a_request_alone_takes_the_time_of_its_steps(new_simulation: Callable[..., Simulation]) -> None:
    trace = trace_of(TraceRequest(1.0, 40, 3))
    result = new_simulation(trace, submit_delay_s=0.25).run()
    (outcome,) = result.outcomes
    # Two steps of prefill, 32 tokens and 8: the first reads no KV, the second that of the 32 before it.
    first_s = 0.003 + max(0.005, 32e-4) + 1e-7 * (31 * 32 / 2)
    second_s = 0.003 + max(0.005, 8e-4) + 1e-7 * (8 * 32 + 7 * 8 / 2) + 2e-6 * 32
    decodes_s = [0.003 + 0.005 + 2e-6 * num_tokens for num_tokens in (41, 42)]
    assert outcome.first_token_s == pytest.approx(1.25 + first_s + second_s)
    assert outcome.mean_gap_s == pytest.approx(sum(decodes_s) / 2)
    assert result.time_to_first_token.mean == pytest.approx(0.25 + first_s + second_s)
    assert result.utilisation == pytest.approx((first_s + second_s + sum(decodes_s)) / (2 * result.duration_s))


def test_a_prompt_is_found_where_it_was_computed(new_simulation: Callable[..., Simulation]) -> None:
    trace = trace_of(*[TraceRequest(number * 5.0, 24, 2, (0, 1, 2)) for number in range(4)])
    result = new_simulation(trace, num_groups=3).run()
    assert len({outcome.group for outcome in result.outcomes}) == 1
    assert [outcome.num_cached_tokens for outcome in result.outcomes] == [0, 23, 23, 23]
    assert result.block_hit_rate == pytest.approx(3 / 4)
    assert result.imbalance == pytest.approx(3.0)


def test_prompts_share_what_their_blocks_have_in_common(new_simulation: Callable[..., Simulation]) -> None:
    trace = trace_of(TraceRequest(0.0, 24, 2, (0, 1, 2)), TraceRequest(5.0, 30, 2, (0, 1, 3, 4)))
    result = new_simulation(trace, num_groups=1).run()
    assert [outcome.num_cached_tokens for outcome in result.outcomes] == [0, 16]


def test_outputs_are_not_like_anything(new_simulation: Callable[..., Simulation]) -> None:
    """Neither like each other, nor like prompts that no block id stands for."""
    trace = trace_of(*[TraceRequest(number * 5.0, 24 + number, 30) for number in range(3)])
    result = new_simulation(trace, num_groups=1).run()
    assert result.token_hit_rate == 0.0


def test_the_router_learns_of_blocks_after_the_delay(new_simulation: Callable[..., Simulation]) -> None:
    """By then the second request has been routed; only what was predicted of the first one was known."""

    def known(delay_s: float) -> int:
        trace = trace_of(TraceRequest(0.0, 24, 2, (0, 1, 2)), TraceRequest(1.0, 4, 2))
        simulation = new_simulation(trace, report_delay_s=delay_s)
        for _ in simulation.steps():
            pass
        assert isinstance(simulation.policy, RouterPolicy)
        return simulation.policy.router.counters.blocks_stored

    assert known(0.01) >= 6
    assert known(3.0) == 0


@pytest.mark.parametrize("policy", ["cost", "round_robin", "least_loaded"])
def test_every_request_ends_and_gets_all_its_tokens(
    make_trace: Callable[..., Trace], new_simulation: Callable[..., Simulation], policy: str
) -> None:
    trace = make_trace(random.Random(3), 100, rate=200.0)
    result = new_simulation(trace, policy, num_blocks=80, num_groups=3).run()
    assert [outcome.num_output_tokens for outcome in result.outcomes] == [r.num_output_tokens for r in trace.requests]
    assert all(outcome.is_finished for outcome in result.outcomes)
    assert result.num_refused == 0


def test_the_same_again_is_the_same(
    make_trace: Callable[..., Trace], new_simulation: Callable[..., Simulation]
) -> None:
    trace = make_trace(random.Random(4), 50)
    assert new_simulation(trace).run() == new_simulation(trace).run()


def test_cost_finds_more_than_round_robin_and_no_more_than_there_is(
    make_trace: Callable[..., Trace], new_simulation: Callable[..., Simulation]
) -> None:
    trace = make_trace(random.Random(5), 200, rate=5.0)
    by_cost, in_turn = (new_simulation(trace, policy, num_groups=4).run() for policy in ("cost", "round_robin"))
    assert in_turn.block_hit_rate < by_cost.block_hit_rate <= trace.infinite_cache_hit_rate()


def test_what_can_never_fit_is_refused_before_anything_runs(new_simulation: Callable[..., Simulation]) -> None:
    with pytest.raises(ConfigurationError, match="request 2 of by hand has 101 tokens, but a group has room for 100"):
        new_simulation(trace_of(TraceRequest(0.0, 8, 2), TraceRequest(0.0, 81, 20)), num_blocks=25)
