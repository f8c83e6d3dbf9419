"""Which of the groups that could take a request gets it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.router.assessment import Assessment
from octavo.router.config import RouterConfig
from octavo.router.cost import Cost
from octavo.router.policies import POLICIES, PolicyName, make_policy
from octavo.router.router import Router
from octavo.worker.messages import RouteQueries


def seen(
    totals: Sequence[float], *, cached: Sequence[int] = (), present: Sequence[int] = (), given: Sequence[float] = ()
) -> Assessment:
    """Groups g0, g1, … with these costs, cached tokens and sequences."""
    count = len(totals)
    members = tuple(SimpleNamespace(name=f"g{row}", report=SimpleNamespace(block_size=4)) for row in range(count))
    total_s, every = np.array(totals), np.ones(count, np.bool_)
    return Assessment(
        members,  # type: ignore[arg-type]
        every,
        every,
        np.array(present or [0] * count, float),
        np.zeros(count, np.int64),
        np.array(cached or [0] * count),
        np.array(given or [0.0] * count),
        Cost(total_s, *[np.zeros(count)] * 5),
        total_s,
        total_s,
        True,
    )


def choose(name: PolicyName, found: Assessment, query: Any, rng: random.Random | None = None) -> int:
    return make_policy(name, rng or random.Random(0)).choose(query, found, np.arange(len(found.members)))


def test_the_lowest_cost_wins(asker: Any) -> None:
    assert choose("cost", seen([2.0, 1.0, 3.0], cached=[900, 0, 0]), asker.query([1])) == 1


def test_a_near_tie_goes_to_the_longer_prefix(asker: Any) -> None:
    assert choose("cost", seen([1.01, 1.0], cached=[64, 0]), asker.query([1])) == 0


def test_of_equals_the_one_that_was_given_the_least_work_wins(asker: Any) -> None:
    assert choose("cost", seen([1.0] * 3, cached=[64] * 3, given=[0.3, 0.1, 0.2]), asker.query([1])) == 1


@pytest.mark.parametrize("name", ["cost", "least_loaded"])
def test_equal_candidates_share_the_requests(name: PolicyName, asker: Any) -> None:
    policy, found, query = make_policy(name, random.Random(0)), seen([1.0] * 4), asker.query([1])
    counts = Counter(policy.choose(query, found, np.arange(4)) for _ in range(400))
    assert all(counts[row] > 60 for row in range(4))


def test_round_robin_gives_each_its_turn_also_when_one_was_left_out(asker: Any) -> None:
    policy, found, query = make_policy("round_robin", random.Random(0)), seen([1.0] * 3), asker.query([1])
    assert [policy.choose(query, found, np.arange(3)) for _ in range(4)] == [0, 1, 2, 0]
    assert [policy.choose(query, found, np.array([0, 2])) for _ in range(2)] == [2, 0]
    assert policy.choose(query, found, np.arange(3)) == 1


def test_the_fewest_sequences_win(asker: Any) -> None:
    assert choose("least_loaded", seen([1.0] * 3, present=[4, 2, 3]), asker.query([1])) == 1


def test_of_two_drawn_the_emptier_wins_so_the_fullest_never_does(asker: Any) -> None:
    policy, found = make_policy("power_of_two", random.Random(0)), seen([1.0] * 4, present=[9, 0, 1, 2])
    counts = Counter(policy.choose(asker.query([1]), found, np.arange(4)) for _ in range(300))
    assert set(counts) == {1, 2, 3}
    assert counts[1] > counts[3]


def test_consistent_hashing_keeps_sessions_and_beginnings_together(asker: Any) -> None:
    policy, found, rows = make_policy("consistent_hash", random.Random(0)), seen([1.0] * 8), np.arange(8)
    for field in ({"session_id": "s"}, {}):
        chosen = {policy.choose(asker.query([*range(300), n], **field), found, rows) for n in range(20)}
        assert len(chosen) == 1
    sessions = Counter(policy.choose(asker.query([1], session_id=str(n)), found, rows) for n in range(400))
    assert all(sessions[row] > 20 for row in range(8))


def test_consistent_hashing_moves_only_what_has_to_move(asker: Any) -> None:
    policy, found, query = make_policy("consistent_hash", random.Random(0)), seen([1.0] * 8), asker.query
    before = [policy.choose(query([1], session_id=str(n)), found, np.arange(8)) for n in range(200)]
    after = [policy.choose(query([1], session_id=str(n)), found, np.arange(7)) for n in range(200)]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != 7)


def test_consistent_hashing_passes_over_the_overloaded(asker: Any) -> None:
    policy, query = make_policy("consistent_hash", random.Random(0)), asker.query([1], session_id="s")
    owner = policy.choose(query, seen([1.0] * 4), np.arange(4))
    present = [10 if row == owner else 2 for row in range(4)]
    assert policy.choose(query, seen([1.0] * 4, present=present), np.arange(4)) != owner


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_explains_and_keeps_the_books(name: PolicyName, new_leader: Any, asker: Any) -> None:
    router = Router(RouterConfig(policy=name), random.Random(0))
    leaders = {group: new_leader(group, generation=10 + place) for place, group in enumerate("abc")}
    for leader in leaders.values():
        leader.report_to(router, 0.0)
    for number in range(12):
        query = asker.query([number % 2] * 40, session_id=f"s{number % 3}")
        decision = asker.ask(router, query, 0.1 * number)
        assert leaders[decision.group].compute(query) == decision.expected_cached_tokens
        leaders[decision.group].report_to(router, 0.1 * number)
        router.check()
    assert len(router.explain(100)) == 12
    if name != "cost":
        assert {decision["reason"] for decision in router.explain(100)} == {"policy"}


def test_draining_and_excluded_groups_get_nothing_by_any_policy(new_leader: Any, asker: Any) -> None:
    for name in POLICIES:
        router = Router(RouterConfig(policy=name), random.Random(0))
        for place, group in enumerate("abc"):
            leader = new_leader(group, generation=10 + place)
            leader.draining = group == "a"
            leader.report_to(router, 0.0)
        queries = tuple(asker.query([number] * 9, excluded_groups=("b",)) for number in range(8))
        assert {decision.group for decision in router.route(RouteQueries("g", queries), 0.1).decisions} == {"c"}
