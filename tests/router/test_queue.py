"""Requests that wait in the router until a group has room."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.router.config import RouterConfig
from octavo.router.router import Router
from octavo.router.tenants import TenantLimits
from octavo.worker.messages import RequestProgress, RouteDecision, RouteQueries, RouteQuery

FULL = 17
"""Requests that a group of 16 places is given: one more than it has, so that it never idles."""


class Full:
    """A router whose groups a and b have no place left; ``ends`` lets one request of a group end."""

    def __init__(self, new_leader: Any, asker: Any, **settings: Any) -> None:
        self.router = Router(RouterConfig(**settings), random.Random(0))
        self.asker = asker
        self.leaders = {name: new_leader(name, generation=10 + place) for place, name in enumerate("ab")}
        for leader in self.leaders.values():
            leader.capacity, leader.step_s = 100_000, 0.1
            leader.report_to(self.router, 0.0)
        self.running: dict[str, list[str]] = {"a": [], "b": []}
        for number in range(2 * FULL):
            decision = asker.ask(self.router, asker.query([number] * 6), 0.1)
            self.running[decision.group].append(decision.request_id)
        self.report(0.2)

    def report(self, now: float) -> None:
        for name, leader in self.leaders.items():
            leader.num_running = len(self.running[name])
            leader.progress += [RequestProgress(request_id, True, False) for request_id in self.running[name]]
            leader.report_to(self.router, now)

    def ends(self, name: str, now: float) -> None:
        request_id = self.running[name].pop()
        self.leaders[name].progress.append(RequestProgress(request_id, True, True, 0, 100))
        self.report(now)

    def ask(self, now: float, gateway: str = "g", **fields: Any) -> RouteDecision:
        query = self.asker.query([7] * 6, **fields)
        (decision,) = self.router.route(RouteQueries(gateway, (query,)), now).decisions
        return decision

    def turns(self, now: float) -> dict[str, list[RouteDecision]]:
        turns = {gateway: list(decisions) for gateway, decisions in self.router.take_turns(now).items()}
        self.router.check()
        return turns


@pytest.fixture
def full(new_leader: Any, asker: Any) -> Full:
    return Full(new_leader, asker)


def test_a_request_waits_until_a_group_has_room_and_goes_there(full: Full) -> None:
    queued = full.ask(1.0)
    assert (queued.queued, queued.group, queued.reason, full.router.num_queued) == (True, None, "queued", 1)
    assert full.turns(1.1) == {}
    full.ends("b", 2.5)
    ((gateway, (decision,)),) = full.turns(2.5).items()
    assert (gateway, decision.request_id, decision.group) == ("g", queued.request_id, "b")
    assert full.router.num_queued == 0
    (explained,) = full.router.explain(1)
    assert (explained["queued_s"], explained["group"]) == (pytest.approx(1.5), "b")
    assert "octavo_router_queue_time_seconds_count 1.0" in full.router.metrics_text()


def test_who_came_first_goes_first_and_urgent_ones_before(full: Full) -> None:
    late = [full.ask(1.0 + 0.1 * number, gateway=f"g{number}") for number in range(3)]
    urgent = full.ask(1.5, priority=-1)
    order = []
    for number in range(6):
        full.ends("a", 2.0 + number)
        order += [decision.request_id for decisions in full.turns(2.0 + number).values() for decision in decisions]
    assert order == [urgent.request_id, *[decision.request_id for decision in late]]


def test_a_full_queue_refuses_with_the_time_to_come_again(new_leader: Any, asker: Any) -> None:
    full = Full(new_leader, asker, max_queued_requests=2)
    for _ in range(2):
        assert full.ask(1.0).queued
    refused = full.ask(1.1)
    assert (refused.group, refused.reason, refused.queued) == (None, "queue_full", False)
    assert "--router-max-queued-requests is 2" in refused.detail
    assert refused.retry_after_s is not None
    assert refused.retry_after_s >= 1.0


def test_no_limit_leaves_the_queueing_to_the_groups(new_leader: Any, asker: Any) -> None:
    full = Full(new_leader, asker, max_queued_requests=None)
    assert {full.ask(1.0).group for _ in range(40)} == {"a", "b"}
    assert full.router.num_queued == 0


def test_what_cannot_be_met_is_refused_and_what_was_not_is_ended(full: Full) -> None:
    """32 places come free every 128 times 0.1 s, so the first in line waits for 0.4 s."""
    assert full.ask(1.0, queue_timeout_s=0.3).reason == "deadline"
    waiting = full.ask(1.0, queue_timeout_s=3.0)
    assert waiting.queued
    assert full.turns(3.9) == {}
    full.report(4.0)
    ((_, (decision,)),) = full.turns(4.1).items()
    assert (decision.request_id, decision.reason, decision.group) == (waiting.request_id, "queue_timeout", None)


def test_a_prompt_that_could_not_be_begun_in_time_is_refused_though_there_is_room(new_leader: Any, asker: Any) -> None:
    router, leader = Router(RouterConfig(), random.Random(0)), new_leader("a")
    leader.num_uncomputed = 60_000  # at 1,000 tokens a second
    leader.report_to(router, 0.0)
    refused = asker.ask(router, asker.query([1] * 9, timeout_s=10.0), 0.1)
    assert (refused.group, refused.reason) == (None, "deadline")
    assert "its timeout is 10 s" in refused.detail
    assert asker.ask(router, asker.query([1] * 9, timeout_s=100.0), 0.1).group == "a"
    assert asker.ask(router, asker.query([1] * 9, timeout_s=10.0, attempt=2), 0.1).group == "a"
    router.check()


def test_what_was_under_way_elsewhere_does_not_wait_for_others(full: Full) -> None:
    assert full.ask(1.0).queued
    assert full.ask(1.1, attempt=2).group in ("a", "b")


def test_who_gives_up_leaves_the_queue(full: Full) -> None:
    queued = full.ask(1.0)
    full.router.route(RouteQueries("g", (), (queued.request_id,)), 1.1)
    assert full.router.num_queued == 0
    full.ends("a", 2.0)
    full.ends("a", 2.1)
    assert full.turns(2.1) == {}


def test_a_pinned_request_that_waits_does_not_hold_up_others(full: Full) -> None:
    pinned = full.ask(1.0, allowed_groups=("a",))
    other = full.ask(1.1)
    full.ends("b", 2.0)
    ((_, (decision,)),) = full.turns(2.2).items()
    assert (decision.request_id, decision.group) == (other.request_id, "b")
    full.ends("a", 3.0)
    ((_, (decision,)),) = full.turns(3.2).items()
    assert (decision.request_id, decision.group) == (pinned.request_id, "a")


def test_tenants_take_turns_by_their_weights(new_leader: Any, asker: Any) -> None:
    full = Full(new_leader, asker, tenants={"big": TenantLimits(weight=3.0)})
    names = {full.ask(1.0, tenant="small" if number % 2 else "big").request_id: number % 2 for number in range(40)}
    served = []
    for number in range(12):
        full.ends("a", 2.0 + 0.1 * number)
        (decision,) = full.turns(2.0 + 0.1 * number)["g"]
        full.running["a"].insert(0, decision.request_id)
        served.append(names[decision.request_id])
    assert 2 <= sum(served) <= 4  # of the small one: a quarter


def test_a_tenant_at_its_limit_waits_though_there_is_room(new_leader: Any, asker: Any) -> None:
    router, leader = (
        Router(RouterConfig(tenants={"*": TenantLimits(max_running_requests=1)}), random.Random(0)),
        new_leader(),
    )
    leader.report_to(router, 0.0)
    first, second = (asker.ask(router, asker.query([1] * 9, tenant="t"), 0.1) for _ in range(2))
    assert (first.group, second.queued) == ("a", True)
    assert asker.ask(router, asker.query([1] * 9, tenant="u"), 0.1).group == "a"
    leader.progress.append(RequestProgress(first.request_id, True, True, 0, 5, tenant="t"))
    leader.report_to(router, 0.2)
    assert [each.request_id for each in router.take_turns(0.2)["g"]] == [second.request_id]


def test_a_restarted_router_counts_what_runs(new_leader: Any, asker: Any) -> None:
    router = Router(RouterConfig(tenants={"t": TenantLimits(max_running_requests=2)}), random.Random(0))
    leader = new_leader()
    leader.progress += [RequestProgress(f"old{number}", True, False, tenant="t") for number in range(2)]
    leader.report_to(router, 0.0)
    assert asker.ask(router, asker.query([1] * 9, tenant="t"), 0.1).queued
    leader.progress.append(RequestProgress("old0", True, True, tenant="t"))
    leader.report_to(router, 0.2)
    assert len(router.take_turns(0.2)["g"]) == 1


def test_a_group_that_dies_frees_what_its_requests_counted_for(full: Full, new_leader: Any) -> None:
    queued: list[RouteQuery] = [full.ask(1.0) for _ in range(3)]  # type: ignore[misc]
    full.running["a"] = []
    full.leaders["a"] = new_leader("a", generation=99)
    full.leaders["a"].capacity, full.leaders["a"].step_s = 100_000, 0.1
    full.report(2.0)
    assert [each.request_id for each in full.turns(2.0)["g"]] == [each.request_id for each in queued]
    assert full.router.admission.num_running == FULL + 3


def test_who_waits_for_groups_that_are_gone_is_told(full: Full) -> None:
    pinned, other = full.ask(1.0, allowed_groups=("a",)), full.ask(1.0)
    full.leaders["a"].draining = True
    full.report(2.0)
    assert [(each.request_id, each.reason) for each in full.turns(2.0)["g"]] == [(pinned.request_id, "no_group")]
    ((_, (decision,)),) = full.turns(30.0).items()  # neither has reported for long
    assert (decision.request_id, decision.reason) == (other.request_id, "no_group")
    assert full.router.num_queued == 0


def test_progress_of_what_waits_here_does_not_take_it_out_of_the_queue(full: Full) -> None:
    """Its first group was slow to say that it had it; the gateway has given that up and asks again."""
    queued = full.ask(1.0)
    full.leaders["a"].progress.append(RequestProgress(queued.request_id, False, False))
    full.report(1.1)
    assert full.router.num_queued == 1
    full.ends("b", 2.0)
    assert [each.request_id for each in full.turns(2.0)["g"]] == [queued.request_id]


def test_who_asks_again_while_all_groups_drain_is_answered_once(full: Full) -> None:
    query = full.asker.query([7] * 6, queue_timeout_s=5.0)
    ask = RouteQueries("g", (query,))
    assert full.router.route(ask, 1.0).decisions[0].queued
    for leader in full.leaders.values():
        leader.draining = True
    full.report(1.1)
    assert full.router.route(ask, 1.2).decisions[0].reason == "no_group"
    assert full.router.num_queued == 0
    assert full.turns(9.0) == {}


def test_who_asks_again_keeps_its_place(full: Full) -> None:
    first, second = full.asker.query([7] * 6), full.asker.query([8] * 6)
    for now, query in ((1.0, first), (1.1, second), (1.2, first)):
        assert full.router.route(RouteQueries("g", (query,)), now).decisions[0].queued
    full.ends("a", 2.0)
    assert [each.request_id for each in full.turns(2.0)["g"]] == [first.request_id]


def test_the_wait_here_counts_for_a_deadline(full: Full) -> None:
    """5 of 6 s are over; where it could go it would wait for 4 more."""
    queued = full.ask(1.0, queue_timeout_s=6.0)
    assert queued.queued
    for leader in full.leaders.values():
        leader.num_uncomputed = 4_000
    full.running["a"] = []
    full.report(6.0)
    assert [each.reason for each in full.turns(6.0)["g"]] == ["deadline"]


def test_a_session_is_remembered_whether_its_request_waited_or_not(new_leader: Any, asker: Any) -> None:
    full = Full(new_leader, asker, knows_tenants=False)
    assert full.ask(1.0, session_id="s", tenant="t").queued
    full.ends("b", 2.0)
    full.turns(2.0)
    query = full.asker.query([7] * 6, session_id="s", tenant="t")
    assert full.router.sessions.groups_of(query) == ("b",)
