"""A report with numbers that no group has disturbs nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from octavo.router.config import RouterConfig
from octavo.router.judge import impossible
from octavo.router.router import Router

WRONG = {
    "block_size": [0, -16, 1.5, True, 10**400],
    "max_num_seqs": [0],
    "num_running": [-100, None],
    "num_waiting": [-1],
    "num_free_blocks": [-1, float("nan")],
    "num_uncomputed_prompt_tokens": [10**400, float("inf")],
    "prefill_tokens_per_s": [float("nan"), -1.0, 1e-320, float("inf"), "fast"],
    "decode_step_s": [float("inf"), -0.1],
    "prefill_context": [float("nan")],
    "prefill_context_s": [float("inf")],
    "oldest_news_age_s": [-5.0],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_impossible_numbers_are_named_and_disturb_nothing(
    new_leader: Any, asker: Any, name: str, value: object
) -> None:
    router, good = Router(RouterConfig(), random.Random(0)), new_leader("good")
    good.report_to(router, 0.0)
    wrong = replace(new_leader("wrong", generation=2).report(), **{name: value})
    problem = impossible(wrong)
    assert problem is not None
    assert problem.startswith(f"{name} is ")
    assert router.report(wrong, 0.1) is False
    assert [entry.group for entry in router.registry(0.1).entries] == ["good"]
    assert asker.ask(router, asker.query([1] * 20), 0.1).group == "good"
    assert "octavo_router_reports_malformed_total 1.0" in router.metrics_text()
    router.check()


def test_what_groups_say_is_possible(new_leader: Any) -> None:
    leader = new_leader()
    assert impossible(leader.report()) is None
    leader.rate, leader.step_s, leader.num_uncomputed = 0.0, 0.0, 10_000_000
    assert impossible(leader.report()) is None
