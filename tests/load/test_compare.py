"""What is called a difference, and what noise."""

from __future__ import annotations

import numpy as np
import pytest
from load_plays import run_of, sample

from octavo.cluster.load.compare import Difference, Verdict, compare, has_repeats
from octavo.cluster.load.result import Result
from octavo.cluster.load.sample import Run

NUM_REQUESTS = 80


def random_run(rng: np.random.Generator, factor: float, drift: float) -> Run:
    """A closed loop of one: answers of ten tokens, their times ``factor`` as long; ``drift`` is of the whole run."""
    now_s, samples = 0.0, []
    scale = factor * float(np.exp(drift * rng.standard_normal()))
    for number in range(NUM_REQUESTS):
        gaps = scale * rng.gamma(4.0, 0.01, size=10)
        times = tuple((now_s + np.cumsum(gaps)).tolist())
        fields = {"due_s": now_s, "free_s": now_s, "sent_s": now_s, "num_output_tokens": 10}
        samples.append(sample(script=number, token_times_s=times, **fields))
        now_s = times[-1]
    return run_of(samples, wall_s=now_s)


def result(seed: int, *, factor: float = 1.0, num_repeats: int = 1, drift: float = 0.0) -> Result:
    rng = np.random.default_rng(seed)
    return Result("", {}, None, tuple(random_run(rng, factor, drift) for _ in range(num_repeats)))


def named(differences: list[Difference]) -> dict[str, Difference]:
    return {difference.name: difference for difference in differences}


@pytest.mark.parametrize("num_repeats", [1, 4])
def test_two_results_of_the_same_server_hardly_ever_differ(num_repeats: int) -> None:
    """An interval of 99 % fails in 1 of 100; here in at most 3 of more than 50."""
    drift = 0.05 if num_repeats > 1 else 0.0
    verdicts = [
        difference.verdict
        for seed in range(4)
        for difference in compare(
            result(seed, num_repeats=num_repeats, drift=drift), result(100 + seed, num_repeats=num_repeats, drift=drift)
        )
    ]
    assert len(verdicts) > 50
    assert sum(verdict is not Verdict.NOISE for verdict in verdicts) <= 3


@pytest.mark.parametrize("num_repeats", [1, 4])
def test_a_server_that_is_half_as_fast_is_told_from_noise(num_repeats: int) -> None:
    drift = 0.05 if num_repeats > 1 else 0.0
    first = result(1, num_repeats=num_repeats, drift=drift)
    second = result(2, num_repeats=num_repeats, drift=drift, factor=2.0)
    assert has_repeats(first, second) == (num_repeats > 1)
    found = named(compare(first, second))
    assert found["ttft_s.p50"].verdict is found["output_tokens_per_s"].verdict is Verdict.WORSE
    assert found["ttft_s.p50"].ratio == pytest.approx(2.0, rel=0.2)
    assert found["output_tokens_per_s"].ratio == pytest.approx(0.5, rel=0.2)
    assert named(compare(second, first))["itl_s.mean"].verdict is Verdict.BETTER


def test_a_drift_between_repeats_is_noise_although_requests_within_one_agree() -> None:
    first, second = (result(seed, num_repeats=4, drift=0.5) for seed in (3, 4))
    assert named(compare(first, second))["itl_s.mean"].verdict is Verdict.NOISE


def test_only_what_both_have_is_compared() -> None:
    first = result(1)
    second = Result("", {}, None, (run_of([sample(num_cached_tokens=None)]),))
    assert "cached_share" in named(compare(first, first))
    assert "cached_share" not in named(compare(first, second))
