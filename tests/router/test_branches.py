"""Requests of several sequences, and requests that do without the prefix cache."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.router.cost import Demand, Load, estimate_cost
from octavo.router.knowledge import KnowledgeState
from octavo.worker.messages import RequestProgress

PROMPT = list(range(400))
LOAD = Load(
    reported_at_s=0.0,
    backlog_tokens=0.0,
    reserved_tokens=0.0,
    prefill_tokens_per_s=1000.0,
    prefill_token_s=0.001,
    prefill_context_s=0.0,
    num_sequences=8,
    max_num_seqs=16,
    full_step_s=0.02,
    step_slope_s=0.001,
    num_free_blocks=100,
    block_size=16,
)


# ---- the cost ----


def test_the_prompt_is_computed_once_and_every_output_slows_the_others() -> None:
    cost = estimate_cost(LOAD, Demand(500.0, 0.0, 100.0, 4), 0.0, 1.0, 0.0)
    assert cost.prefill_s == 0.5
    assert cost.interference_s == pytest.approx((0.5 + 0.001 * 4 * 100) * 8 / 16)


def test_every_sequence_needs_a_seat() -> None:
    """8 of 16 seats are taken: with 12 sequences 4 more must come free, one every 0.125 s."""
    assert estimate_cost(LOAD, Demand(500.0, 0.0, 100.0, 8), 0.0, 1.0, 0.0).wait_s == 0.0
    assert estimate_cost(LOAD, Demand(500.0, 0.0, 100.0, 12), 0.0, 1.0, 0.0).wait_s == pytest.approx(4 * 0.125)


def test_every_output_needs_blocks() -> None:
    """500 tokens of prompt and 20 times 100 of output, where 1,600 are free."""
    assert estimate_cost(LOAD, Demand(500.0, 0.0, 100.0, 20), 0.0, 1.0, 0.0).pressure_s == pytest.approx(0.9)


@given(st.integers(1, 200), st.integers(0, 50), st.floats(0, 1000), st.floats(0, 1000))
def test_more_sequences_never_cost_less(num_sequences: int, more: int, uncached: float, output: float) -> None:
    few = estimate_cost(LOAD, Demand(uncached, 0.0, output, num_sequences), 0.2, 1.0, 0.0)
    many = estimate_cost(LOAD, Demand(uncached, 0.0, output, num_sequences + more), 0.2, 1.0, 0.0)
    assert many.total_s >= few.total_s


# ---- the books ----


@pytest.fixture
def cluster(new_router: Any, new_leader: Any) -> tuple[Any, dict[str, Any]]:
    router, leaders = new_router(), {name: new_leader(name) for name in "ab"}
    for leader in leaders.values():
        leader.report_to(router, 0.0)
    return router, leaders


def num_sequences(router: Any, group: str) -> int:
    pool = router.pools["m"]
    return int(pool.load().num_sequences[pool.groups[group].row])


def test_a_reservation_counts_all_sequences_until_the_group_has_it(cluster: Any, asker: Any) -> None:
    router, leaders = cluster
    query = asker.query(PROMPT, num_branches=5)
    group = asker.ask(router, query, 0.1).group
    assert num_sequences(router, group) == 5
    router.check()
    leaders[group].progress.append(RequestProgress(query.request_id, False, False))
    leaders[group].report_to(router, 0.2)
    assert num_sequences(router, group) == 0
    router.check()


def test_after_a_wide_request_others_go_elsewhere(cluster: Any, asker: Any) -> None:
    router, _ = cluster
    wide = asker.ask(router, asker.query([1, 2, 3], num_branches=16), 0.1)
    later = [asker.ask(router, asker.query([4, 5, number]), 0.1).group for number in range(8)]
    assert wide.group not in later


@pytest.mark.parametrize("reports", [["prefilled", "finished"], ["prefilled and finished"], ["finished"]])
def test_the_length_of_outputs_is_learned_by_the_sequence(cluster: Any, asker: Any, reports: list[str]) -> None:
    """Four outputs of 1,000 tokens together are 250 each, whenever the group says so."""
    router, leaders = cluster
    pool = router.pools["m"]
    for _ in range(200):
        query = asker.query(PROMPT, num_branches=4)
        group = asker.ask(router, query, 0.1).group
        for told in reports:
            finished = "finished" in told
            leaders[group].progress.append(
                RequestProgress(query.request_id, "prefilled" in told, finished, 0, 1000 if finished else 0)
            )
            router.report(leaders[group].report(), 0.2)
    assert pool.output_tokens.value == pytest.approx(250, rel=0.05)
    assert all(not group.decoding for group in pool.groups.values())


# ---- doing without the prefix cache ----


def test_a_request_without_hashes_predicts_nothing_and_casts_no_doubt(cluster: Any, asker: Any) -> None:
    """The group holds its whole prompt, and finds nothing of it because the request does not look."""
    router, leaders = cluster
    for leader in leaders.values():
        leader.compute(asker.query(PROMPT))
        leader.report_to(router, 0.1)
    query = asker.query(PROMPT)
    query = type(query)(query.request_id, "m", b"", len(PROMPT), 16)
    decision = asker.ask(router, query, 0.2)
    assert decision.expected_cached_tokens == 0
    assert len(router.predictions) == 0
    leaders[decision.group].progress.append(RequestProgress(query.request_id, True, False, num_cached_tokens=0))
    assert router.report(leaders[decision.group].report(), 0.3) is False
    assert all(group.knowledge.state is KnowledgeState.EXACT for group in router.pools["m"].groups.values())
    assert router.counters.outcomes == {"as_expected": 1}
    assert asker.ask(router, asker.query([*PROMPT, 1]), 0.4).expected_cached_tokens == len(PROMPT)
