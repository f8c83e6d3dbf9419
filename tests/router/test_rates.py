"""The online estimators."""

from __future__ import annotations

import random

import pytest

from octavo.router.rates import DecayedRate, DecodeModel, Mean


def test_a_mean_begins_at_its_prior_and_follows_what_is_measured() -> None:
    mean = Mean(100.0)
    assert mean.value == 100.0
    for _ in range(100):
        mean.add(10.0)
    assert mean.value == pytest.approx(10.0, rel=0.5)
    for _ in range(1000):
        mean.add(50.0)
    assert mean.value == pytest.approx(50.0, rel=0.05)


def test_a_rate_follows_a_steady_stream_and_fades_without_it() -> None:
    rate = DecayedRate(10.0)
    for second in range(100):
        rate.add(3.0, float(second))
    assert rate.per_s(99.5) == pytest.approx(3.0, rel=0.1)
    assert rate.per_s(150.0) < 0.03


def test_a_decode_model_finds_the_line() -> None:
    model, rng = DecodeModel(), random.Random(0)
    for _ in range(500):
        n = rng.randint(1, 32)
        model.add(n, 0.005 + 0.0002 * n + rng.gauss(0, 0.0002))
    assert model.slope_s == pytest.approx(0.0002, rel=0.1)
    assert model.step_s(64) == pytest.approx(0.005 + 0.0128, rel=0.1)


def test_without_variation_the_slope_is_a_small_share_of_the_step() -> None:
    model = DecodeModel()
    for _ in range(50):
        model.add(8, 0.01)
    assert model.slope_s == pytest.approx(0.0002)
    assert model.step_s(8) == pytest.approx(0.01)
