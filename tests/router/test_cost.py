"""The parts of the cost, and the choice among costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.router.cost import Cost, Demand, Load, choose_cheapest, estimate_cost

IDLE = Load(
    reported_at_s=0.0,
    reported_backlog_s=0.0,
    reserved_backlog_s=0.0,
    prefill_tokens_per_s=1000.0,
    num_sequences=0,
    max_num_seqs=16,
    full_step_s=0.02,
    step_slope_s=0.001,
    num_free_blocks=100,
    block_size=16,
)
DEMAND = Demand(num_uncached_tokens=500.0, num_output_tokens=100.0)


def test_an_idle_group_costs_its_prefill() -> None:
    assert estimate_cost(IDLE, DEMAND, 0.0, 0.0) == Cost(0.0, 0.5, 0.0, 0.0, 0.0)


def test_work_ahead_is_waited_for() -> None:
    busy = IDLE._replace(reported_backlog_s=2.0, reserved_backlog_s=0.5)
    assert estimate_cost(busy, DEMAND, 0.0, now=0.0).wait_s == 2.5
    assert estimate_cost(busy, DEMAND, 0.0, now=1.5).wait_s == 1.0
    assert estimate_cost(busy, DEMAND, 0.0, now=3.0).wait_s == 0.5


def test_a_full_group_must_first_finish_someone() -> None:
    """16 seats, each freed after 100 steps of 20 ms: one every 0.125 s; the third in line waits for three."""
    cost = estimate_cost(IDLE._replace(num_sequences=18), DEMAND, 0.0, 0.0)
    assert cost.wait_s == pytest.approx(3 * 0.125)


def test_company_slows_decoding() -> None:
    cost = estimate_cost(IDLE._replace(num_sequences=8), DEMAND, 0.0, 0.0)
    assert cost.interference_s == pytest.approx(8 * 0.001 * 100 + 0.5 * 8 / 16)


def test_missing_blocks_are_someones_work_done_again() -> None:
    """600 tokens need 37.5 blocks; 7.5 of them are not free: 120 tokens."""
    cost = estimate_cost(IDLE._replace(num_free_blocks=30), DEMAND, 0.0, 0.0)
    assert cost.pressure_s == pytest.approx(0.12)


def test_work_is_dearer_when_others_will_come() -> None:
    assert estimate_cost(IDLE, DEMAND, 0.5, 0.0).imposed_s == pytest.approx(0.5)
    assert estimate_cost(IDLE, DEMAND, 0.8, 0.0).imposed_s == pytest.approx(2.0)
    assert estimate_cost(IDLE, DEMAND, 7.0, 0.0).imposed_s == pytest.approx(4.5)


loads = st.builds(
    Load,
    reported_at_s=st.just(0.0),
    reported_backlog_s=st.floats(0, 100),
    reserved_backlog_s=st.floats(0, 100),
    prefill_tokens_per_s=st.floats(1, 1e6),
    num_sequences=st.integers(0, 500),
    max_num_seqs=st.integers(1, 256),
    full_step_s=st.floats(0, 1),
    step_slope_s=st.floats(0, 0.01),
    num_free_blocks=st.integers(0, 10_000),
    block_size=st.integers(1, 128),
)


@given(loads, st.floats(0, 1e5), st.floats(0, 1e4), st.floats(0, 5), st.floats(0, 1e5))
def test_parts_are_not_negative_and_more_work_never_costs_less(
    load: Load, uncached: float, output: float, utilisation: float, more: float
) -> None:
    cost = estimate_cost(load, Demand(uncached, output), utilisation, 0.0)
    assert min(cost) >= 0
    assert cost.total_s == pytest.approx(sum(cost))
    assert estimate_cost(load, Demand(uncached + more, output), utilisation, 0.0).total_s >= cost.total_s


def _cost(total: float) -> Cost:
    return Cost(total, 0.0, 0.0, 0.0, 0.0)


def test_the_lowest_cost_wins() -> None:
    assert choose_cheapest([_cost(2.0), _cost(1.0), _cost(3.0)], [900, 0, 0], random.Random(0)) == 1


def test_a_near_tie_goes_to_the_longer_prefix() -> None:
    assert choose_cheapest([_cost(1.01), _cost(1.0)], [64, 0], random.Random(0)) == 0


def test_equal_candidates_share_the_requests() -> None:
    rng = random.Random(0)
    choices = [choose_cheapest([_cost(1.0)] * 4, [0] * 4, rng) for _ in range(400)]
    assert all(choices.count(position) > 60 for position in range(4))
