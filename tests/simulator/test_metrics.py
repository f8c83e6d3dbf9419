"""Figures are summed up as they are named."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from octavo.router.simulator.metrics import QuantileHistogram, Results
from octavo.router.simulator.traces import Trace, TraceRequest
from octavo.worker.messages import FinishReason, SequenceUpdate


def test_a_histogram_is_exact_to_a_percent() -> None:
    rng = random.Random(0)
    values = [rng.lognormvariate(-4.0, 1.0) for _ in range(2000)]
    histogram = QuantileHistogram()
    for value in values:
        histogram.add(value)
    times = histogram.times()
    assert times.mean == pytest.approx(np.mean(values))
    assert times[1:] == pytest.approx(np.quantile(values, (0.5, 0.9, 0.99)), rel=0.02)


def test_a_histogram_counts_many_at_once() -> None:
    histogram = QuantileHistogram()
    histogram.add(0.001, 98)
    histogram.add(1.0, 2)
    assert histogram.times().p90 == pytest.approx(0.001, rel=0.01)
    assert histogram.times().p99 == pytest.approx(1.0, rel=0.01)


def test_a_histogram_of_nothing() -> None:
    assert all(math.isnan(value) for value in QuantileHistogram().times())


def update(number: int, *, finished: bool = False, cached: int = 0) -> SequenceUpdate:
    return SequenceUpdate(str(number), 0, 0, (1,), FinishReason.LENGTH if finished else None, num_cached_tokens=cached)


def test_figures_of_two_requests_and_one_refused() -> None:
    trace = Trace(
        "three",
        8,
        (TraceRequest(1.0, 20, 3, (0, 1, 2)), TraceRequest(2.0, 40, 1), TraceRequest(3.0, 16, 1, (0, 1))),
    )
    ended: list[None] = []
    results = Results(trace, ["a", "b"], 2, on_finished=lambda: ended.append(None))
    results.note_routed(0, "a")
    results.note_routed(1, "a")
    results.note_refused(2)
    results.note_update(update(0), 1.5)
    results.note_coasted(["0"], [1.6])
    results.note_update(update(0, finished=True, cached=17), 1.8)
    results.note_update(update(1, finished=True, cached=0), 5.0)
    assert (results.num_left, len(ended)) == (0, 3)
    result = results.summary([], 10.0)
    assert result.block_hit_rate == pytest.approx(2 / (3 + 5 + 2)), "two blocks are whole, the third was found in part"
    assert result.token_hit_rate == pytest.approx(17 / 76)
    assert result.time_to_first_token.mean == pytest.approx((0.5 + 3.0) / 2)
    assert result.inter_token.mean == pytest.approx(0.15)
    assert result.imbalance == pytest.approx(43 / (43 / 2))
    assert result.num_refused == 1
    assert result.goodput(1.0, 0.16) == pytest.approx(1 / 3)
    assert result.goodput(1.0, 0.14) == 0.0
    assert result.goodput(3.5, 0.16) == pytest.approx(2 / 3)
    assert result.figures(3.5, 0.16)["goodput_per_s"] == pytest.approx(0.2)
