"""Where requests go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.router.router import Router
from octavo.worker.messages import RequestProgress, RouteDecision, RouteQueries, RouteQuery
from octavo.worker.routing_hash import pack_hashes

SYSTEM_PROMPT = list(range(1000))


@pytest.fixture
def cluster(new_router: Any, new_leader: Any) -> tuple[Router, dict[str, Any]]:
    """A router and two groups that hold nothing yet."""
    router, leaders = new_router(), {name: new_leader(name, generation=10 + i) for i, name in enumerate("ab")}
    for leader in leaders.values():
        leader.report_to(router, 0.0)
    return router, leaders


def chat(number: int) -> list[int]:
    return [*SYSTEM_PROMPT, *range(5000 + 20 * number, 5020 + 20 * number)]


def test_chats_that_share_a_prefix_stay_together(cluster: tuple[Router, dict[str, Any]], asker: Any) -> None:
    router, leaders = cluster
    groups = set()
    for number in range(24):
        now = float(number)
        query = asker.query(chat(number))
        decision = asker.ask(router, query, now)
        assert leaders[decision.group].compute(query) == decision.expected_cached_tokens
        assert decision.expected_cached_tokens == (1000 if number else 0)
        assert decision.reason == ("prefix" if number else "cold")
        groups.add(decision.group)
        leaders[decision.group].progress.append(RequestProgress(query.request_id, True, True, 0, 10))
        for leader in leaders.values():
            leader.report_to(router, now + 0.5)
    assert len(groups) == 1
    assert router.counters.outcomes == {"as_expected": 24}
    assert router.counters.actual_cached_tokens["m"] == 23_000


def test_siblings_follow_the_first_before_any_event(cluster: tuple[Router, dict[str, Any]], asker: Any) -> None:
    router, _ = cluster
    first = asker.ask(router, asker.query(chat(0)), 0.1)
    second = asker.ask(router, asker.query(chat(1)), 0.1)
    assert (second.group, second.expected_cached_tokens) == (first.group, 1000)


def test_a_burst_spreads_when_its_owner_is_overloaded(cluster: tuple[Router, dict[str, Any]], asker: Any) -> None:
    """Waiting for 2 s of other work costs more than computing the prefix of 1 s again; in the end both have a queue."""
    router, leaders = cluster
    query = asker.query(chat(0))
    owner = asker.ask(router, query, 0.1).group
    leaders[owner].compute(query)
    leaders[owner].num_uncomputed = 2000
    leaders[owner].report_to(router, 0.2)
    decisions = [asker.ask(router, asker.query(chat(n)), 0.2) for n in range(1, 80)]
    assert decisions[0].group != owner
    assert decisions[0].reason == "load"
    assert decisions[1].expected_cached_tokens == 1000
    counts = Counter(decision.group for decision in decisions)
    assert len(counts) == 2
    assert min(counts.values()) >= 15


def test_cold_requests_share_the_groups_evenly(cluster: tuple[Router, dict[str, Any]], asker: Any) -> None:
    router, _ = cluster
    prompts = [list(range(n * 1000, n * 1000 + 400)) for n in range(20)]
    counts = Counter(asker.ask(router, asker.query(tokens), 0.1).group for tokens in prompts)
    assert set(counts.values()) == {10}


def test_a_session_stays_where_it_was_when_nothing_else_decides(cluster: Any, asker: Any) -> None:
    router, _ = cluster
    for number in range(8):  # prompts of their own, so that no prefix keeps them together
        session = {"session_id": f"s{number % 2}"}
        query = asker.query([1000 * number + i for i in range(3)], **session)
        decision = asker.ask(router, query, 100.0 * number)
        router.route(RouteQueries("g", (), (query.request_id,)), 100.0 * number)
        for leader in cluster[1].values():
            leader.report_to(router, 100.0 * number + 99.0)
        assert router.sessions.groups_of(query) == (decision.group,)
    asked = [decision["group"] for decision in router.explain(8)]
    assert len(set(asked[0::2])) == len(set(asked[1::2])) == 1


def test_a_faster_group_gets_more(new_router: Any, new_leader: Any, asker: Any) -> None:
    router = new_router()
    for name, rate in (("slow", 1000.0), ("fast", 3000.0)):
        leader = new_leader(name)
        leader.rate = rate
        leader.report_to(router, 0.0)
    prompts = [list(range(n * 1000, n * 1000 + 400)) for n in range(40)]
    counts = Counter(asker.ask(router, asker.query(tokens), 0.1).group for tokens in prompts)
    assert 26 <= counts["fast"] <= 34


def test_groups_that_are_alike_look_alike_whatever_their_last_steps_were(new_router: Any, new_leader: Any) -> None:
    """A mean rate says more of the last prompts than of the group: 1 ms a token, 1 µs for each before it."""
    router = new_router()
    for name, contexts in (("a", (0.0, 9000.0)), ("b", (4000.0, 100.0))):
        leader = new_leader(name)
        for now, context in enumerate(contexts):
            leader.rate = 1.0 / (0.001 + 1e-6 * context)
            report = replace(leader.report(), prefill_context=context, prefill_context_s=1e-6)
            router.report(report, float(now))
    load = router.pools["m"].load()
    assert load.prefill_token_s.tolist() == pytest.approx([0.001] * 2)
    assert load.prefill_context_s.tolist() == pytest.approx([1e-6] * 2)


def test_a_newcomer_gets_its_share_of_cold_requests_and_no_more(new_router: Any, new_leader: Any, asker: Any) -> None:
    """It has measured nothing and holds nothing, and is taken to be as fast as its peers."""
    router = new_router()
    for name in "abc":
        new_leader(name).report_to(router, 0.0)
    for number in range(30):
        asker.ask(router, asker.query(list(range(number * 1000, number * 1000 + 200))), 0.1)
    newcomer = new_leader("new", generation=9)
    newcomer.rate = newcomer.step_s = 0.0
    newcomer.report_to(router, 0.2)
    prompts = [list(range(n * 1000, n * 1000 + 200)) for n in range(100, 130)]
    counts = Counter(asker.ask(router, asker.query(tokens), 0.2).group for tokens in prompts)
    assert counts["new"] == 15  # ten to be level with the others, and a quarter of the rest
    assert all(counts[name] == 5 for name in "abc")


def test_what_others_have_cached_stays_with_them_when_a_newcomer_comes(
    new_router: Any, new_leader: Any, asker: Any
) -> None:
    router, leader = new_router(), new_leader("a")
    leader.report_to(router, 0.0)
    query = asker.query(chat(0))
    asker.ask(router, query, 0.1)
    leader.compute(query)
    leader.report_to(router, 0.2)
    new_leader("new", generation=9).report_to(router, 0.3)
    assert asker.ask(router, asker.query(chat(1)), 0.4).group == "a"


def test_refusals_say_why(cluster: tuple[Router, dict[str, Any]], asker: Any) -> None:
    router, leaders = cluster
    unknown = asker.ask(router, asker.query([1] * 8, model="other"), 0.1)
    assert (unknown.group, unknown.reason, unknown.retry_after_s) == (None, "unknown_model", None)
    excluded = asker.ask(router, asker.query([1] * 8, excluded_generations=(10, 11)), 0.1)
    assert (excluded.group, excluded.reason) == (None, "no_group")
    for leader in leaders.values():
        leader.draining = True
        leader.report_to(router, 0.2)
    draining = asker.ask(router, asker.query([1] * 8), 0.3)
    assert (draining.group, draining.reason) == (None, "no_group")
    assert draining.retry_after_s


def test_models_are_kept_apart(new_router: Any, new_leader: Any, asker: Any) -> None:
    router = new_router()
    for name in ("x", "y"):
        leader = new_leader(name, model=name)
        leader.compute(asker.query([1] * 40))
        leader.report_to(router, 0.0)
    for name in ("x", "y"):
        decision = asker.ask(router, asker.query([1] * 40, model=name), 0.1)
        assert (decision.group, decision.expected_cached_tokens, decision.reason) == (name, 36, "only")


@pytest.mark.parametrize("tokens", [[], [1], [1] * 4, [-5] * 9])
def test_odd_prompts_are_routed(cluster: tuple[Router, dict[str, Any]], asker: Any, tokens: list[int]) -> None:
    router, _ = cluster
    for _ in range(2):
        decision = asker.ask(router, asker.query(tokens), 0.1)
        assert decision.group in ("a", "b")
        assert decision.expected_cached_tokens <= max(0, len(tokens) - 1)


def test_the_last_token_is_never_expected_from_the_cache(cluster: Any, asker: Any) -> None:
    router, leaders = cluster
    leaders["a"].compute(asker.query([7] * 16))
    leaders["a"].report_to(router, 0.1)
    assert asker.ask(router, asker.query([7] * 16), 0.2).expected_cached_tokens == 12
    assert asker.ask(router, asker.query([7] * 17), 0.2).expected_cached_tokens == 16


def test_a_silent_group_is_dropped_and_may_come_back(cluster: Any, asker: Any) -> None:
    router, leaders = cluster
    leaders["b"].report_to(router, 3.0)
    assert {entry.group for entry in router.registry(4.9).entries} == {"a", "b"}
    assert {entry.group for entry in router.registry(5.0).entries} == {"b"}
    assert asker.ask(router, asker.query([1] * 8), 5.1).reason == "only"
    leaders["a"].report_to(router, 6.0)
    assert {entry.group for entry in router.registry(6.0).entries} == {"a", "b"}


def test_a_new_generation_voids_the_old(cluster: Any, new_leader: Any, asker: Any) -> None:
    router, leaders = cluster
    query = asker.query(chat(0))
    leaders["a"].compute(query)
    leaders["a"].report_to(router, 0.1)
    new_leader("a", generation=99).report_to(router, 0.2)
    assert router.report(leaders["a"].report(), 0.3) is False
    entries = {entry.group: entry.generation for entry in router.registry(0.3).entries}
    assert entries == {"a": 99, "b": 11}
    assert asker.ask(router, asker.query(chat(1)), 0.3).expected_cached_tokens == 0
    assert router.counters.reports_fenced == 1


def test_a_second_attempt_releases_the_first(cluster: Any, asker: Any) -> None:
    router, _ = cluster
    query = asker.query(chat(0))
    first = asker.ask(router, query, 0.1)
    again = RouteQuery(**{**_fields(query), "excluded_generations": (first.generation,)})
    second = asker.ask(router, again, 0.2)
    assert second.group != first.group
    loads = {name: len(group.reservations) for name, group in router.pools["m"].groups.items()}
    assert loads == {first.group: 0, second.group: 1}
    router.check()


def test_a_cancelled_request_leaves_nothing(cluster: Any, asker: Any) -> None:
    router, _ = cluster
    query = asker.query(chat(0))
    asker.ask(router, query, 0.1)
    router.route(RouteQueries("g", (), cancelled=(query.request_id, "unheard-of")), 0.2)
    assert router.predictions.num_blocks == 0
    router.check()


def test_a_request_lost_on_the_way_is_forgotten_in_time(cluster: Any, asker: Any) -> None:
    router, leaders = cluster
    asker.ask(router, asker.query(chat(0)), 0.1)
    for second in range(1, 12):
        for leader in leaders.values():
            leader.report_to(router, float(second))
    assert router.counters.reservations_expired == 1
    assert router.predictions.num_blocks == 0


def test_a_restarted_router_knows_load_and_blocks_from_the_first_reports(
    cluster: Any, new_router: Callable[..., Router], asker: Any
) -> None:
    old, leaders = cluster
    query = asker.query(chat(0))
    owner = asker.ask(old, query, 0.1).group
    leaders[owner].compute(query)
    leaders[owner].num_uncomputed = 500
    for leader in leaders.values():
        leader.report()  # Lost with the old router.
    router = new_router()
    for leader in leaders.values():
        leader.report_to(router, 0.2)
    decision = asker.ask(router, asker.query(chat(1)), 0.2)
    assert (decision.group, decision.expected_cached_tokens) == (owner, 1000)
    (explained,) = router.explain(1)
    waits = {candidate["group"]: candidate["cost"]["wait_s"] for candidate in explained["candidates"]}
    assert waits[owner] == pytest.approx(0.5)


def test_a_decision_is_explained_with_all_candidates(cluster: Any, asker: Any) -> None:
    router, leaders = cluster
    query = asker.query(chat(0))
    decision = asker.ask(router, query, 0.1)
    leaders[decision.group].compute(query)
    leaders[decision.group].report_to(router, 0.2)
    asker.ask(router, asker.query(chat(1)), 0.3)
    newest, oldest = router.explain(10)
    assert newest["reason"] == "prefix"
    assert oldest["actual_cached_tokens"] == 0
    for candidate in newest["candidates"]:
        parts = dict(candidate["cost"])
        assert parts.pop("total_s") == pytest.approx(sum(parts.values()))
        assert candidate["knowledge"] == "exact"
    assert router.explain(0) == []


def test_metrics_tell_decisions_state_and_hits(cluster: Any, asker: Any) -> None:
    router, leaders = cluster
    for number in range(2):
        query = asker.query(chat(number))
        leaders[asker.ask(router, query, 0.1).group].compute(query)
        for leader in leaders.values():
            leader.report_to(router, 0.2)
    text = router.metrics_text()
    for line in (
        'octavo_router_decisions_total{model="m",reason="cold"} 1.0',
        'octavo_router_decisions_total{model="m",reason="prefix"} 1.0',
        'octavo_router_expected_cached_tokens_total{model="m"} 1000.0',
        'octavo_router_actual_cached_tokens_total{model="m"} 1000.0',
        'octavo_router_groups{knowledge="exact",model="m"} 2.0',
        'octavo_router_predictions_total{outcome="as_expected"} 2.0',
        "octavo_router_index_entries 260.0",
    ):
        assert line in text.splitlines()


def _fields(query: RouteQuery) -> dict[str, Any]:
    return {name: getattr(query, name) for name in query.__dataclass_fields__}


class LivingCluster(RuleBasedStateMachine):
    """Groups come, go, drain and restart while requests are routed, computed, retried and given up."""

    make_router: Callable[..., Router]
    make_leader: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        self.router = type(self).make_router()
        self.now = 0.0
        self.leaders: dict[str, Any] = {}
        self.heard: dict[str, float] = {}
        self.told_draining: dict[str, bool] = {}
        self.open: dict[str, tuple[RouteQuery, RouteDecision]] = {}
        self.count = 0

    @rule(name=st.sampled_from("abc"))
    def start(self, name: str) -> None:
        """A group starts, or starts anew."""
        self.count += 1
        self.leaders[name] = type(self).make_leader(name, generation=self.count, capacity=60)
        self.heard.pop(name, None)

    @precondition(lambda self: self.leaders)
    @rule(data=st.data(), draining=st.booleans())
    def report(self, data: st.DataObject, draining: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.leaders)))
        leader = self.leaders[name]
        leader.draining = draining
        leader.report_to(self.router, self.now)
        self.heard[name], self.told_draining[name] = self.now, draining

    @rule(seconds=st.floats(0.1, 3.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(prompt=st.integers(0, 5), length=st.integers(0, 40), excluded=st.lists(st.integers(1, 8), max_size=2))
    def route(self, prompt: int, length: int, excluded: list[int]) -> None:
        self.count += 1
        tokens = [prompt if i > 8 else 0 for i in range(length)]
        hashes = pack_hashes(type(self).hasher.hash_blocks(tokens))  # type: ignore[attr-defined]
        query = RouteQuery(f"r{self.count}", "m", hashes, length, 8, excluded_generations=tuple(excluded))
        (decision,) = self.router.route(RouteQueries("g", (query,)), self.now).decisions
        if decision.group is None:
            assert decision.reason in ("no_group", "unknown_model")
            assert not [name for name in self.heard if self._may_take(name, excluded)]
        else:
            assert decision.generation not in excluded
            if decision.group in self.heard:  # Otherwise it has started anew and not told the router yet.
                assert decision.generation == self.leaders[decision.group].generation
                assert self._may_take(decision.group, excluded)
            self.open[query.request_id] = (query, decision)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), action=st.sampled_from(["compute", "finish", "cancel"]))
    def end(self, data: st.DataObject, action: str) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        query, decision = self.open.pop(request_id)
        leader = self.leaders[str(decision.group)]
        if action == "cancel" or leader.generation != decision.generation:
            self.router.route(RouteQueries("g", (), cancelled=(request_id,)), self.now)
        elif action == "compute":
            leader.compute(query)
        else:
            leader.progress.append(RequestProgress(request_id, False, True))

    @invariant()
    def books_balance(self) -> None:
        self.router.check()

    def teardown(self) -> None:
        """When all requests have ended and all groups have reported, nothing is left reserved or assumed."""
        for query, decision in self.open.values():
            leader = self.leaders[str(decision.group)]
            if leader.generation == decision.generation:
                leader.compute(query)
        self.now += 2.0
        for leader in self.leaders.values():
            leader.report_to(self.router, self.now)
        self.router.route(RouteQueries("g", (), cancelled=tuple(self.open)), self.now)
        self.router.check()
        assert len(self.router.predictions) == 0
        assert all(not group.reservations for pool in self.router.pools.values() for group in pool.groups.values())

    def _may_take(self, name: str, excluded: list[int]) -> bool:
        alive = self.now - self.heard[name] < self.router.config.group_timeout_s
        return alive and not self.told_draining[name] and self.leaders[name].generation not in excluded


def test_a_living_cluster(new_router: Any, new_leader: Any) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    from octavo.worker.routing_hash import RoutingHasher

    machine = type(
        "Machine",
        (LivingCluster,),
        {
            "make_router": staticmethod(new_router),
            "make_leader": staticmethod(new_leader),
            "hasher": RoutingHasher(bytes(16), 4),
        },
    )
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))
