"""When scripts arrive."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from octavo.cluster.load.arrivals import at_once, gamma_arrivals


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_burstiness(burstiness: float) -> None:
    arrivals = gamma_arrivals(5.0, burstiness, np.random.default_rng(1))
    gaps = np.diff(list(itertools.islice(arrivals, 20_000)))
    assert gaps.mean() == pytest.approx(0.2, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.06)


def test_poisson_arrivals_in_a_second_vary_as_much_as_their_mean() -> None:
    arrivals = itertools.takewhile(lambda time: time < 2_000, gamma_arrivals(5.0, 1.0, np.random.default_rng(2)))
    counts = np.bincount([int(time) for time in arrivals], minlength=2_000)
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.1)


def test_the_same_seed_gives_the_same_arrivals() -> None:
    first, second = (list(itertools.islice(gamma_arrivals(1, 1, np.random.default_rng(3)), 9)) for _ in range(2))
    assert first == second


def test_an_infinite_rate_is_all_at_once() -> None:
    assert list(itertools.islice(at_once(), 3)) == [0.0, 0.0, 0.0]
