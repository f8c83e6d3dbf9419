"""When a model gets another worker group, and when it gives one away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from octavo.cluster.autoscaling import ByOutlook, autoscaling_options, wanted_groups


@pytest.mark.parametrize(
    ("num_groups", "ttft_s", "free_share", "wanted"),
    [
        (2, 0.5, 0.5, 2),  # as it should be
        (2, 1.5, 0.5, 3),  # half as long again: half as many again
        (2, 60.0, 0.5, 4),  # never more than twice as many at once
        (3, 0.5, 0.05, 4),  # the first token comes in time, but there is no room for more sequences
        (3, 0.1, 0.9, 2),  # two would do
        (3, 0.1, 0.5, 3),  # two would be nearly full
        (1, 0.0, 1.0, 1),
    ],
)
def test_groups_follow_the_time_to_the_first_token_and_the_blocks(
    num_groups: int, ttft_s: float, free_share: float, wanted: int
) -> None:
    assert wanted_groups(num_groups, ttft_s, free_share, target_ttft_s=1.0) == wanted


def context(current: int, target: int, **metrics: float) -> Any:
    told = {name: {"replica a": value, "replica b": value} for name, value in metrics.items()}
    return SimpleNamespace(current_num_replicas=current, target_num_replicas=target, aggregated_metrics=told)


def test_as_long_as_nothing_is_known_everything_stays() -> None:
    assert ByOutlook(1.0)(context(2, 3)) == (3, {})


def test_a_group_that_comes_up_is_not_given_up_because_it_does_not_serve_yet() -> None:
    policy = ByOutlook(1.0)
    assert policy(context(2, 4, expected_ttft_s=0.9, free_share=0.5)) == (4, {})
    assert policy(context(2, 2, expected_ttft_s=3.0, free_share=0.5)) == (4, {})
    assert policy(context(3, 3, expected_ttft_s=0.0, free_share=1.0)) == (2, {})


def test_serve_takes_what_it_is_given() -> None:
    config = AutoscalingConfig(**autoscaling_options(1, 3, 2.0, 60.0))
    assert (config.min_replicas, config.max_replicas, config.downscale_delay_s) == (1, 3, 60.0)
    assert config.policy.policy_kwargs == {"target_ttft_s": 2.0}
