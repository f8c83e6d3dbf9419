"""What the router expects for a new request, as groups report more and more work."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from octavo.router.config import RouterConfig
from octavo.router.outlook import Outlook, outlook
from octavo.router.router import Router
from octavo.worker.messages import GroupReport

REPORT = GroupReport(
    model="m",
    group="a",
    generation=1,
    block_size=16,
    num_blocks=1000,
    num_free_blocks=500,
    max_num_seqs=8,
    num_running=0,
    num_waiting=0,
    num_uncomputed_prompt_tokens=0,
    prefill_tokens_per_s=1000.0,
    decode_step_s=0.01,
    draining=False,
    progress=(),
)


@pytest.fixture
def router() -> Router:
    return Router(RouterConfig(), random.Random(0))


def told(router: Router, *reports: GroupReport) -> Outlook:
    for report in reports:
        router.report(report, 0.0)
    found = router.outlook("m")
    assert found is not None
    return found


def test_a_model_without_groups_has_none(router: Router) -> None:
    assert router.outlook("m") is None
    router.report(replace(REPORT, draining=True), 0.0)
    assert router.outlook("m") is None


def test_prompts_ahead_are_waited_for_at_the_best_group(router: Router) -> None:
    idle = told(router, REPORT)
    busy = told(router, replace(REPORT, num_uncomputed_prompt_tokens=5000))
    assert busy.expected_ttft_s == pytest.approx(idle.expected_ttft_s + 5.0)
    helped = told(router, replace(REPORT, group="b", generation=2, num_free_blocks=1000))
    assert helped.expected_ttft_s == pytest.approx(idle.expected_ttft_s)


def test_free_blocks_are_those_of_all_groups_that_take_requests(router: Router) -> None:
    assert told(router, REPORT).free_share == 0.5
    other = replace(REPORT, group="b", generation=2, num_free_blocks=1000)
    assert told(router, other).free_share == 0.75
    assert told(router, replace(other, draining=True)).free_share == 0.5


def test_queries_that_wait_are_counted_where_prompts_were_too_short_to_be_measured(router: Router) -> None:
    """A queue of chats with short questions needs more groups like any other."""
    full = replace(REPORT, prefill_tokens_per_s=0.0, num_running=8, max_num_seqs=8)
    router.report(full, 0.0)
    (pool,) = router.pools.values()
    alone, behind_many = outlook(pool, 0), outlook(pool, 100)
    assert alone is not None
    assert behind_many is not None
    assert alone.expected_ttft_s == pytest.approx(0.01, rel=0.5)
    assert behind_many.expected_ttft_s - alone.expected_ttft_s == pytest.approx(100 / pool.drain_per_s())
