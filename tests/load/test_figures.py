"""Figures of samples whose times are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from load_plays import run_of, sample

from octavo.cluster.load.figures import distribution, figures, flat
from octavo.cluster.load.sample import Run
from octavo.cluster.load.slo import Slo, parse_slo
from octavo.worker.errors import ConfigurationError


def test_times_count_from_when_a_request_was_due() -> None:
    late = sample(due_s=0.25, free_s=0.25, sent_s=0.75)
    found = figures(run_of([late]))
    assert found["ttft_s"]["p50"] == 0.75
    assert found["e2e_s"]["p50"] == 1.75
    assert found["tpot_s"]["mean"] == found["itl_s"]["mean"] == 0.5
    assert found["late_s"]["max"] == 0.5


def test_time_per_token_is_by_tokens_and_gaps_are_by_pieces_of_text() -> None:
    found = figures(run_of([sample(num_output_tokens=5)]))
    assert found["tpot_s"]["mean"] == 0.25
    assert found["itl_s"]["mean"] == 0.5


def test_rates_are_of_answered_requests_and_their_tokens() -> None:
    failed = sample(error="http 429", token_times_s=(), num_prompt_tokens=None, message="later")
    found = figures(run_of([sample(), sample(num_output_tokens=5), failed], wall_s=4.0, num_unsent=2))
    assert (found["num_requests"], found["num_good"], found["num_unsent"]) == (3, 2, 2)
    assert found["requests_per_s"] == 0.5
    assert found["output_tokens_per_s"] == 2.0
    assert found["tokens_per_s"] == 7.0
    assert found["errors"] == {"http 429": {"count": 1, "example": "later"}}


def test_percentiles_are_those_of_numpy_and_leave_out_what_is_no_number() -> None:
    values = np.random.default_rng(0).exponential(size=999).tolist()
    found = distribution([*values, math.nan])
    assert found["p99.9"] == pytest.approx(np.percentile(values, 99.9))
    assert found["mean"] == pytest.approx(np.mean(values))
    assert math.isnan(distribution([])["p50"])


def test_goodput_counts_what_keeps_every_limit_and_failures_as_missed() -> None:
    samples = [
        sample(),
        sample(token_times_s=(1.2, 1.3, 1.4)),
        sample(token_times_s=(0.1, 0.2, 5.0)),
        sample(token_times_s=(0.1,), num_output_tokens=1),
        sample(error="timeout", token_times_s=()),
    ]
    found = figures(run_of(samples, wall_s=2.0), Slo(ttft_s=1.0, tpot_s=0.5))
    assert found["goodput"] == 2 / 5
    assert found["goodput_per_s"] == 1.0


def test_cached_tokens_and_balance_are_what_the_server_says() -> None:
    samples = [sample(group="a"), sample(group="a"), sample(group="b", num_cached_tokens=10)]
    found = figures(run_of(samples))
    assert found["cached_share"] == 18 / 30
    assert found["num_computed_prompt_tokens"] == 12
    assert found["groups"] == {
        "a": {"num_requests": 2, "num_computed_prompt_tokens": 12},
        "b": {"num_requests": 1, "num_computed_prompt_tokens": 0},
    }
    assert found["imbalance"] == 2.0


def test_a_server_that_says_nothing_of_caches_and_groups_has_no_such_figures() -> None:
    found = figures(run_of([sample(num_cached_tokens=None), sample()]))
    assert not {"cached_share", "imbalance", "groups"} & set(found)


def test_most_in_flight_is_counted_by_times() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (2.5, 4.0), (1.5, 1.75)]
    samples = [sample(sent_s=sent, token_times_s=(end,)) for sent, end in spans]
    assert figures(run_of(samples))["most_in_flight"] == 3


def test_flat_figures_are_the_numbers_by_their_path() -> None:
    assert flat({"a": 1, "b": {"c": 2.5, "d": "text"}, "e": True}) == {"a": 1.0, "b.c": 2.5}


def test_a_run_is_the_same_after_a_file() -> None:
    run = run_of([sample(), sample(error="timeout", token_times_s=())], num_unsent=3)
    assert Run.from_json(run.to_json()) == run


def test_limits_are_seconds_unless_they_say_otherwise() -> None:
    assert parse_slo("ttft=500ms, tpot=0.05,e2e=10s") == Slo(0.5, 0.05, 10.0)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=0", "ttft=-1", "itl=1", "ttft=1,ttft=2", "ttft=1h"])
def test_limits_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--slo: "):
        parse_slo(text)
