"""The rules of other routers, as they are published, on a cluster followed by hand."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from published_rules import RULES, Prefixes

from octavo.router.simulator.policies import Policy
from octavo.router.simulator.simulation import Simulation
from octavo.router.simulator.traces import Trace
from octavo.worker.messages import BlocksRemoved, BlocksStored, GroupReport, KVEvents, RequestProgress, RouteQuery
from octavo.worker.routing_hash import pack_hashes

GROUPS = ("a", "b", "c")


def report(
    policy: Policy, group: str, *, finished: str = "", prefilled: str = "", events: tuple[Any, ...] = ()
) -> None:
    progress = [RequestProgress(name, prefilled=True, finished=name in finished) for name in (*finished, *prefilled)]
    messages = (KVEvents(1, 0, events),) if events else ()
    policy.report(GroupReport("", group, 1, 4, 100, 100, 8, 0, 0, 0, 0.0, 0.0, False, tuple(progress), messages), 0.0)


def policy_of(name: str) -> Policy:
    policy = RULES[name](random.Random(0))
    for group in GROUPS:
        report(policy, group)
    return policy


def route(policy: Policy, request_id: str, *hashes: int) -> tuple[str | None, int]:
    decision = policy.route(RouteQuery(request_id, "", pack_hashes(hashes), 4 * len(hashes), 10), 0.0)
    return decision.group, decision.expected_cached_tokens


@pytest.mark.parametrize("name", ["sglang", "ray"])
def test_own_decisions_are_what_is_known(name: str) -> None:
    policy = policy_of(name)
    first, _ = route(policy, "1", 1, 2, 3)
    assert route(policy, "2", 1, 2, 3, 4) == (first, 12)
    assert route(policy, "3", 7, 8)[0] != first


def test_sglang_leaves_the_prefix_for_the_shortest_queue() -> None:
    policy = policy_of("sglang")
    groups = [route(policy, str(number), 1, 2, 3)[0] for number in range(66)]
    assert groups[:65] == ["a"] * 65
    assert groups[65] == "b", "65 wait there and none elsewhere: more than 64 apart"
    assert route(policy, "short", 1, 9, 10, 11)[0] == "c", "a quarter is no match"


def test_sglang_forgets_what_was_used_longest_ago() -> None:
    prefixes = Prefixes(3)
    prefixes.add("a", [1, 2, 3])
    prefixes.add("a", [1, 9])
    assert prefixes.depths([1, 2, 3], ["a"]) == {"a": 2}
    assert prefixes.depths([1, 9], ["a"]) == {"a": 2}


def test_ray_takes_the_shortest_queue_of_those_that_match() -> None:
    policy = policy_of("ray-10")
    first = route(policy, "0", 1, 2, 3)[0]
    others = [route(policy, str(number), 1, 2, 3)[0] for number in range(1, 11)]
    assert others == [first] * 10
    groups = {route(policy, f"more {number}", 1, 2, 3)[0] for number in range(30)}
    assert len(groups) > 1, "11 wait there: two are drawn at random"


def test_dynamo_weighs_blocks_to_compute_and_blocks_in_use() -> None:
    policy = policy_of("dynamo")
    report(policy, "b", events=(BlocksStored(None, pack_hashes([1, 2, 3])),))
    assert route(policy, "1", 1, 2, 3) == ("b", 12), "0 to compute and 3 in use, against 3 and 3"
    report(policy, "b", prefilled="1")
    assert route(policy, "2", 1, 2, 3, 4, 5) == ("b", 12), "2 to compute and 5 in use, against 5 and 5"
    assert route(policy, "3", 7, 8)[0] != "b", "2 and 2 under way to compute and 7 in use, against 2 and 2"
    report(policy, "b", finished="12", events=(BlocksRemoved(pack_hashes([3, 2])),))
    assert route(policy, "4", 1, 2, 3, 4) == ("b", 4), "3 to compute and 4 in use, against 4 and 4"


@pytest.mark.parametrize("name", RULES)
def test_a_trace_is_served_to_its_end(
    make_trace: Callable[..., Trace], new_simulation: Callable[..., Simulation], name: str
) -> None:
    trace = make_trace(random.Random(3), 60, rate=100.0)
    result = new_simulation(trace, RULES[name], num_groups=3).run()
    assert all(outcome.is_finished for outcome in result.outcomes)
    assert result.block_hit_rate > 0.2
