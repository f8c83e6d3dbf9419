"""Two routers that serve the same groups tell each other what they decide."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.router.config import RouterConfig
from octavo.router.router import Router
from octavo.worker.messages import RequestProgress, RouteQueries, SharedReservation, SharedReservations

PROMPT = list(range(400))


class Two:
    """Each group reports to both routers; ``tell`` brings to each what the other has decided."""

    def __init__(self, new_leader: Any) -> None:
        self.routers = [Router(RouterConfig(shares=True), random.Random(seed)) for seed in (0, 1)]
        self.leaders = {name: new_leader(name, generation=10 + place) for place, name in enumerate("ab")}
        for leader in self.leaders.values():
            leader.tell()
            self.report(leader, 0.0)

    def report(self, leader: Any, now: float) -> None:
        report = leader.report()
        for router in self.routers:
            router.report(report, now)

    def tell(self, now: float) -> None:
        news = [router.take_shared() for router in self.routers]
        for shared, other in zip(news, reversed(self.routers), strict=True):
            if shared is not None:
                other.adopt(shared, now)
        for router in self.routers:
            router.check()

    def reserved(self, group: str) -> list[int]:
        return [len(router.pools["m"].groups[group].reservations) for router in self.routers]


@pytest.fixture
def two(new_leader: Any) -> Two:
    return Two(new_leader)


def test_a_sibling_at_the_other_router_follows_before_any_event(two: Two, asker: Any) -> None:
    first = asker.ask(two.routers[0], asker.query([*PROMPT, 1]), 0.1)
    two.tell(0.1)
    second = asker.ask(two.routers[1], asker.query([*PROMPT, 2]), 0.1)
    assert (second.group, second.expected_cached_tokens) == (first.group, 400)


def test_load_given_by_one_router_is_seen_by_the_other(two: Two, asker: Any) -> None:
    first = asker.ask(two.routers[0], asker.query(PROMPT), 0.1)
    two.tell(0.1)
    assert asker.ask(two.routers[1], asker.query([9] * 300), 0.1).group != first.group


def test_what_is_computed_is_released_at_both(two: Two, asker: Any) -> None:
    query = asker.query(PROMPT)
    group = asker.ask(two.routers[0], query, 0.1).group
    two.tell(0.1)
    assert two.reserved(group) == [1, 1]
    two.leaders[group].compute(query)
    two.report(two.leaders[group], 0.2)
    assert two.reserved(group) == [0, 0]
    assert [router.counters.actual_cached_tokens["m"] for router in two.routers] == [0, 0]
    assert [sum(router.counters.outcomes.values()) for router in two.routers] == [1, 0]  # counted where it was decided


def test_what_is_given_up_is_released_at_both(two: Two, asker: Any) -> None:
    query = asker.query(PROMPT)
    group = asker.ask(two.routers[0], query, 0.1).group
    two.tell(0.1)
    two.routers[0].route(RouteQueries("g", (), (query.request_id,)), 0.2)
    two.tell(0.2)
    assert two.reserved(group) == [0, 0]


def test_a_second_attempt_at_the_other_router_takes_the_place_of_the_first(two: Two, asker: Any) -> None:
    query = asker.query(PROMPT)
    asker.ask(two.routers[0], query, 0.1)
    two.tell(0.1)
    second = asker.ask(two.routers[1], query, 0.2)
    two.tell(0.2)
    assert sum(two.reserved("a")) + sum(two.reserved("b")) == 2
    two.routers[0].cancel((query.request_id,), 0.3)  # the gateway undoes what it asked there first
    two.tell(0.3)
    assert two.reserved(second.group)[1] == 1


def test_what_is_unknown_here_or_repeated_is_harmless(two: Two, new_leader: Any, asker: Any) -> None:
    asker.ask(two.routers[0], asker.query(PROMPT), 0.1)
    shared = two.routers[0].take_shared()
    assert shared is not None
    assert two.routers[0].take_shared() is None
    empty = Router(RouterConfig(shares=True), random.Random(2))
    empty.adopt(shared, 0.1)
    empty.check()
    for _ in range(2):
        two.routers[1].adopt(shared, 0.1)
    two.routers[1].check()
    restarted = new_leader(shared.reservations[0].group, generation=99)
    two.report(restarted, 0.2)
    two.routers[1].adopt(shared, 0.3)
    assert two.reserved(restarted.group)[1] == 0


def test_lost_messages_leave_nothing_for_long(two: Two, asker: Any) -> None:
    query = asker.query(PROMPT)
    group = asker.ask(two.routers[0], query, 0.1).group
    two.tell(0.1)
    two.routers[0].cancel((query.request_id,), 0.2)
    two.routers[0].take_shared()  # lost
    for second in range(1, 13):
        two.leaders[group].progress.append(RequestProgress(f"other{second}", True, True))
        two.report(two.leaders[group], float(second))
    assert two.reserved(group) == [0, 0]


def test_a_query_that_waits_here_is_not_touched_by_what_another_router_made_of_it(new_leader: Any, asker: Any) -> None:
    two = Two(new_leader)
    for leader in two.leaders.values():
        leader.num_running, leader.step_s = 100, 0.1
        two.report(leader, 0.1)
    query = asker.query(PROMPT)
    (queued,) = two.routers[1].route(RouteQueries("g", (query,)), 0.2).decisions
    assert queued.queued
    two.routers[0].adopt(SharedReservations((SharedReservation(query, "a", 10, 0),)), 0.2)
    for cancelled in (False, True):
        shared = () if cancelled else (SharedReservation(query, "a", 10, 0),)
        two.routers[1].adopt(SharedReservations(shared, (query.request_id,) if cancelled else ()), 0.3)
        two.routers[1].check()
        assert two.routers[1].num_queued == 1
    two.leaders["b"].num_running = 3
    two.report(two.leaders["b"], 0.4)
    assert [each.request_id for each in two.routers[1].take_turns(0.4)["g"]] == [query.request_id]


def test_what_has_ended_here_is_not_reserved_by_a_late_word_of_its_beginning(two: Two, asker: Any) -> None:
    query = asker.query(PROMPT)
    group = asker.ask(two.routers[0], query, 0.1).group
    two.leaders[group].progress.append(RequestProgress(query.request_id, True, True, 0, 5))
    two.report(two.leaders[group], 0.2)
    two.tell(0.3)
    assert two.reserved(group) == [0, 0]
