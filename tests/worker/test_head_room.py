"""Head-room against simulations of sequences that grow and end."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.worker.head_room import HeadRoom

BLOCK = 16
MANY = 10**9
"""Tokens that the running sequences may still get: no limit to speak of."""


def learned(lengths: list[int]) -> HeadRoom:
    room = HeadRoom(BLOCK)
    for length in lengths:
        room.note_finished(length)
    return room


def geometric(mean: float, num: int = 256) -> list[int]:
    """Lengths with the moments of a geometric distribution: its quantiles, in a fixed random order."""
    quantiles = (np.arange(num) + 0.5) / num
    lengths = np.ceil(np.log1p(-quantiles) * -mean).astype(int)
    return [int(length) for length in np.random.default_rng(0).permutation(lengths)]


def margin(num_running: int) -> float:
    return BLOCK * math.sqrt(num_running)


def test_nothing_runs() -> None:
    assert learned([100]).tokens(0, 0, MANY) == 0


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_the_margin_alone_while_nothing_is_known(lengths: list[int]) -> None:
    assert learned(lengths).mean_residual_tokens == 0.0
    assert learned(lengths).tokens(64, 1000, MANY) == 8 * BLOCK


def test_equal_lengths_are_met_half_way() -> None:
    assert learned([100] * 5).mean_residual_tokens == pytest.approx(50)


def test_a_long_one_is_more_likely_to_be_met() -> None:
    assert learned([10, 10, 10, 1000] * 50).mean_residual_tokens > 400


@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_residual_life_is_what_a_look_at_a_random_moment_finds(sigma: float) -> None:
    rng = np.random.default_rng(1)
    lengths = rng.lognormal(5.0, sigma, 200).round().astype(int)
    met = rng.choice(lengths, 200_000, p=lengths / lengths.sum())
    residuals = met * rng.random(met.size)
    assert learned(lengths.tolist()).mean_residual_tokens == pytest.approx(residuals.mean(), rel=0.03)


def test_the_load_of_long_ago_is_forgotten() -> None:
    room = learned([1000] * 500)
    for _ in range(2000):
        room.note_finished(10)
    assert room.mean_residual_tokens < 100


@pytest.mark.parametrize("held", [0, 50, 150, 300])
def test_it_is_the_peak_of_the_mean_use(held: int) -> None:
    """Of 200 sequences that hold ``held`` tokens each, in 2,000 runs of a simulation."""
    num, room = 200, learned(geometric(200.0))
    assert room.mean_residual_tokens == pytest.approx(200, rel=0.02)
    residuals = np.random.default_rng(2).exponential(room.mean_residual_tokens, (2000, num))
    times = np.arange(0, 600, 5)
    use = np.array([((residuals > time).sum(axis=1) * (held + time)).mean() for time in times])
    expected_peak = num * held + room.tokens(num, num * held, MANY) - margin(num)
    assert expected_peak == pytest.approx(use.max(), rel=0.005)


def test_sequences_that_hold_much_give_back_more_than_the_others_gain() -> None:
    assert learned(geometric(100)).tokens(100, 100 * 500, MANY) == 10 * BLOCK


def test_it_grows_with_what_runs_and_shrinks_with_what_is_held() -> None:
    room = learned(geometric(200))
    assert room.tokens(10, 0, MANY) < room.tokens(20, 0, MANY) < room.tokens(200, 0, MANY)
    assert room.tokens(100, 0, MANY) > room.tokens(100, 5000, MANY) > room.tokens(100, 15000, MANY)


def test_no_more_than_if_none_ended_before_its_mean_residual_life() -> None:
    room = learned(geometric(200))
    assert room.tokens(100, 0, MANY) < 100 * room.mean_residual_tokens


def test_no_more_than_they_may_still_get() -> None:
    """Long outputs in the past say nothing of requests that are bounded."""
    room = learned([4000] * 50)
    assert room.tokens(64, 0, 64 * 8) == 64 * 8 + 8 * BLOCK
