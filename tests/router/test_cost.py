"""The parts of the cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.router.cost import Demand, Load, estimate_cost

IDLE = Load(
    reported_at_s=0.0,
    backlog_tokens=0.0,
    reserved_tokens=0.0,
    prefill_tokens_per_s=1000.0,
    prefill_token_s=0.001,
    prefill_context_s=0.0,
    num_sequences=0,
    max_num_seqs=16,
    full_step_s=0.02,
    step_slope_s=0.001,
    num_free_blocks=100,
    block_size=16,
)
DEMAND = Demand(num_uncached_tokens=500.0, num_reused_tokens=0.0, num_output_tokens=100.0)


def test_an_idle_group_costs_its_prefill() -> None:
    cost = estimate_cost(IDLE, DEMAND, 0.0, 1.0, 0.0)
    assert (cost.prefill_s, cost.total_s) == (0.5, 0.5)


def test_work_ahead_is_waited_for() -> None:
    busy = IDLE._replace(backlog_tokens=2000.0, reserved_tokens=500.0)
    assert estimate_cost(busy, DEMAND, 0.0, 1.0, now=0.0).wait_s == 2.5
    assert estimate_cost(busy, DEMAND, 0.0, 1.0, now=1.5).wait_s == 1.0
    assert estimate_cost(busy, DEMAND, 0.0, 1.0, now=3.0).wait_s == 0.5


def test_a_full_group_must_first_finish_someone() -> None:
    """16 seats, each freed after 100 steps of 20 ms: one every 0.125 s; the third in line waits for three."""
    cost = estimate_cost(IDLE._replace(num_sequences=18), DEMAND, 0.0, 1.0, 0.0)
    assert cost.wait_s == pytest.approx(3 * 0.125)


def test_company_slows_decoding() -> None:
    cost = estimate_cost(IDLE._replace(num_sequences=8), DEMAND, 0.0, 1.0, 0.0)
    assert cost.interference_s == pytest.approx((0.5 + 0.001 * 100) * 8 / 16)


def test_missing_blocks_are_someones_work_done_again() -> None:
    """600 tokens need 37.5 blocks; 7.5 of them are not free: 120 tokens."""
    cost = estimate_cost(IDLE._replace(num_free_blocks=30), DEMAND, 0.0, 1.0, 0.0)
    assert cost.pressure_s == pytest.approx(0.12)


def test_tokens_behind_others_take_longer() -> None:
    """500 tokens behind 1,000: 500 of 1 ms, and 500 * (1000 + 250) times a microsecond."""
    cost = estimate_cost(
        IDLE._replace(prefill_context_s=1e-6), DEMAND._replace(num_reused_tokens=1000.0), 0.0, 1.0, 0.0
    )
    assert cost.prefill_s == pytest.approx(0.5 + 0.625)


def test_work_is_dearer_when_others_will_come() -> None:
    assert estimate_cost(IDLE, DEMAND, 0.5, 1.0, 0.0).imposed_s == pytest.approx(0.5 * 0.5 / 0.25)
    assert estimate_cost(IDLE, DEMAND, 0.8, 2.0, 0.0).imposed_s == pytest.approx(0.5 * 2 * 0.8 / 0.04)
    assert estimate_cost(IDLE, DEMAND, 7.0, 1.0, 0.0).imposed_s == pytest.approx(0.5 * 0.9 / 0.01)


def test_who_is_busier_stays_told_apart_when_all_are_very_busy() -> None:
    two = Load(*[np.full(2, value) for value in IDLE])
    busy = estimate_cost(two, DEMAND, np.array([1.2, 0.9]), 1.0, 0.0).imposed_s
    assert busy.tolist() == pytest.approx([0.5 * 0.9 / 0.01, 0.5 * 0.675 / 0.325**2])


def test_a_preference_is_worth_the_whole_prompt_anew() -> None:
    """Two groups alike, of which the second is preferred: 2,000 tokens at 1,000 a second."""
    two = Load(*[np.full(2, value) for value in IDLE])
    demand = DEMAND._replace(num_prompt_tokens=2000.0, is_preferred=np.array([False, True]))
    assert estimate_cost(two, demand, 0.0, 1.0, 0.0).preference_s.tolist() == [2.0, 0.0]


def test_one_group_costs_the_same_alone_and_among_others() -> None:
    rng = np.random.default_rng(0)
    many = Load(*[rng.uniform(1.0, 50.0, 20) for _ in Load._fields])
    demand = DEMAND._replace(num_uncached_tokens=rng.uniform(0.0, 5000.0, 20))
    together = estimate_cost(many, demand, 0.5, 1.0, 100.0)
    for row in range(20):
        alone = Load(*[values[row] for values in many])
        own = demand._replace(num_uncached_tokens=demand.num_uncached_tokens[row])
        expected = [float(value) for value in estimate_cost(alone, own, 0.5, 1.0, 100.0)]
        assert [values[row] for values in together] == pytest.approx(expected)


loads = st.builds(
    Load,
    reported_at_s=st.just(0.0),
    backlog_tokens=st.floats(0, 1e5),
    reserved_tokens=st.floats(0, 1e5),
    prefill_tokens_per_s=st.floats(1, 1e6),
    prefill_token_s=st.floats(1e-6, 1),
    prefill_context_s=st.floats(0, 1e-4),
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
    cost = estimate_cost(load, Demand(uncached, 10.0, output), utilisation, 1.0, 0.0)
    assert min(cost) >= 0
    assert cost.total_s == pytest.approx(sum(cost))
    assert estimate_cost(load, Demand(uncached + more, 10.0, output), utilisation, 1.0, 0.0).total_s >= cost.total_s
