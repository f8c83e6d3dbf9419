"""Which queries go, wait, or are refused, and whose turn is next."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.router.admission import Admission, AdmissionConfig
from octavo.router.drain import Drain
from octavo.router.tenants import TenantLimits
from octavo.router.verdicts import GO, RefusalReason, Wait
from octavo.router.waiting import MAX_ASKED
from octavo.router.waiting_lines import restriction
from octavo.worker.errors import ConfigurationError
from octavo.worker.messages import RouteQuery


def query(request_id: str, tenant: str | None = None, *, tokens: int = 100, **fields: Any) -> RouteQuery:
    return RouteQuery(request_id, "m", b"", tokens, 10, tenant=tenant, **fields)


class Cluster:
    """Groups with so many free places each."""

    def __init__(self, admission: Admission, **places: int) -> None:
        self.admission = admission
        self.places = places
        self.group_of: dict[str, str] = {}
        self.num_asked = 0

    def groups_for(self, query: RouteQuery) -> list[str]:
        allowed = query.allowed_groups or tuple(self.places)
        return [name for name in allowed if name not in query.excluded_groups and self.places.get(name, 0) > 0]

    def can_place(self, query: RouteQuery) -> bool:
        self.num_asked += 1
        return bool(self.groups_for(query))

    def arrive(self, query: RouteQuery, now: float = 0.0) -> Any:
        verdict = self.admission.arrive(query, now, self.can_place)
        if verdict is GO:
            self.place(query)
        return verdict

    def place(self, query: RouteQuery) -> None:
        group = self.groups_for(query)[0]
        self.places[group] -= 1
        self.group_of[query.request_id] = group
        self.admission.placed(query.request_id, hash(group))

    def let_go(self, now: float = 0.0) -> list[str]:
        """All whose turn it is."""
        names = []
        while (query := self.admission.take_next("m", self.can_place, now)) is not None:
            self.place(query)
            names.append(query.request_id)
        return names

    def finish(self, request_id: str, now: float = 0.0, num_output_tokens: int = 0) -> list[str]:
        self.places[self.group_of.pop(request_id)] += 1
        self.admission.finish(request_id, now, num_output_tokens)
        return self.let_go(now)

    def serve(self, count: int, now: float = 0.0) -> list[str]:
        """One place, ``count`` times in turn: whom it is given to, each ending at once."""
        served = []
        for _ in range(count):
            self.places["a"] += 1
            (name,) = self.let_go(now)
            self.group_of.pop(name)
            self.admission.finish(name, now)
            served.append(name)
        return served


def cluster(num_places: int = 0, **config: Any) -> Cluster:
    tenants = config.pop("tenants", {})
    return Cluster(Admission(AdmissionConfig(tenants=tenants, **config)), a=num_places)


# ---- going and waiting ----


def test_a_query_goes_at_once_while_there_are_places_and_waits_then() -> None:
    one = cluster(2)
    assert [one.arrive(query(name)) for name in "rs"] == [GO, GO]
    assert one.arrive(query("t")) == Wait(0.0)
    assert one.let_go() == []
    assert one.finish("r") == ["t"]
    one.admission.check()


def test_nobody_passes_those_who_wait_for_the_same_place() -> None:
    one = cluster(0)
    one.arrive(query("first"))
    one.places["a"] = 1
    assert isinstance(one.arrive(query("second")), Wait)
    assert one.let_go() == ["first"]


def test_a_query_that_is_repeated_keeps_its_place_and_counts_once() -> None:
    one = cluster(1)
    assert one.arrive(query("r")) is GO
    assert one.admission.arrive(query("r"), 1.0, one.can_place) is GO
    one.arrive(query("s"), 1.0)
    one.arrive(query("t"), 2.0)
    assert isinstance(one.arrive(query("s"), 3.0), Wait)
    assert (one.admission.num_running, one.admission.num_waiting) == (1, 2)
    assert one.finish("r", 4.0) == ["s"]


def test_a_request_that_lost_its_group_goes_on_without_another_turn() -> None:
    one = cluster(1, tenants={"*": TenantLimits(max_running_requests=1, max_queued_requests=0)})
    one.arrive(query("r", "x"))
    one.admission.lose(hash("a"), 0.0)
    assert one.admission.of_tenant("x") == (0, 0)
    moved = query("r", "x", excluded_generations=(hash("a"),))
    one.arrive(query("s"))
    assert one.admission.arrive(moved, 1.0, one.can_place) is GO
    one.admission.check()


def test_a_cancelled_query_is_gone_whether_it_waits_or_runs() -> None:
    one = cluster(1)
    for name in "rst":
        one.arrive(query(name, "x"))
    assert one.admission.cancel("s", 0.0)
    assert one.admission.cancel("r", 0.0)
    assert not one.admission.cancel("r", 0.0)
    assert one.admission.of_tenant("x") == (0, 1)
    one.places["a"] += 1
    assert one.let_go() == ["t"]
    one.admission.check()


# ---- refusals ----


def test_a_full_queue_refuses_with_the_limit_and_the_time_that_the_backlog_takes() -> None:
    one = cluster(0, max_queued_requests=3)
    one.admission.expect_drain("m", 0.5)
    for name in "rst":
        one.arrive(query(name))
    refusal = one.arrive(query("u"))
    assert refusal.reason is RefusalReason.QUEUE_FULL
    assert refusal.detail == "3 requests wait already, --router-max-queued-requests is 3"
    assert refusal.retry_after_s == pytest.approx(4 / 0.5)
    assert one.admission.cancel("r", 0.0)
    assert isinstance(one.arrive(query("u")), Wait)


def test_retry_after_is_at_least_a_second_also_where_nothing_is_known() -> None:
    one = cluster(0, max_queued_requests=0)
    assert one.arrive(query("r")).retry_after_s == 1.0
    one.admission.expect_drain("m", 1000.0)
    assert one.arrive(query("r")).retry_after_s == 1.0
    one.admission.expect_drain("m", 1e-9)
    assert one.arrive(query("r")).retry_after_s == 3600.0


def test_a_tenant_over_its_limits_is_refused_and_told_of_its_own_pace() -> None:
    limits = TenantLimits(max_running_requests=2, max_queued_requests=1)
    one = cluster(100, tenants={"x": limits})
    for now in range(4):  # each of its requests takes 10 s
        one.arrive(query(f"old{now}", "other"), now)
        one.finish(f"old{now}", now + 10.0)
    for name in "rst":
        one.arrive(query(name, "x"), 20.0)
    refusal = one.arrive(query("u", "x"), 20.0)
    assert refusal.reason is RefusalReason.TENANT_LIMIT
    assert refusal.detail == (
        "tenant 'x' has 2 requests running and 1 waiting, max_queued_requests is 1; max_running_requests is 2"
    )
    assert refusal.retry_after_s == pytest.approx(2 / (2 / 10.0))
    assert one.arrive(query("v", "y"), 20.0) is GO


def test_what_cannot_be_served_in_its_time_is_refused_before_it_waits() -> None:
    one = cluster(0)
    one.admission.expect_drain("m", 1.0)
    for number in range(5):
        one.arrive(query(f"w{number}"))
    late = one.arrive(query("r", queue_timeout_s=5.0))
    assert (late.reason, late.detail) == (
        RefusalReason.DEADLINE,
        "it would wait about 6 s, its queue_timeout is 5 s",
    )
    assert one.arrive(query("s", timeout_s=5.5)).reason is RefusalReason.DEADLINE
    assert isinstance(one.arrive(query("t", timeout_s=6.5)), Wait)


def test_who_has_waited_too_long_is_refused_once_with_the_limit() -> None:
    one = cluster(0)
    one.arrive(query("r", queue_timeout_s=3.0, timeout_s=9.0))
    one.arrive(query("s", timeout_s=5.0))
    one.arrive(query("t"))
    assert one.admission.expire(2.9) == []
    first, second = one.admission.expire(3.0) + one.admission.expire(5.0)
    assert (first.request_id, first.reason) == ("r", RefusalReason.QUEUE_TIMEOUT)
    assert first.detail == "it waited 3 s for its turn, its queue_timeout is 3 s"
    assert (second.request_id, second.reason) == ("s", RefusalReason.DEADLINE)
    assert one.admission.expire(100.0) == []
    one.places["a"] = 3
    assert one.let_go(100.0) == ["t"]
    one.admission.check()


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: TenantLimits(weight=0.0), "weight is 0.0; it must be a finite number above 0"),
        (lambda: TenantLimits(weight=float("nan")), "weight is nan"),
        (lambda: TenantLimits(max_running_requests=0), "max_running_requests is 0; it must be at least 1"),
        (lambda: TenantLimits(max_queued_requests=-1), "max_queued_requests is -1; it must be at least 0"),
        (lambda: AdmissionConfig(max_queued_requests=-1), "max_queued_requests is -1"),
        (lambda: AdmissionConfig(priority_aging_s=float("inf")), "priority_aging_s is inf"),
    ],
)
def test_impossible_limits_are_refused_by_name(create: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        create()


# ---- the order ----


def test_lower_priority_values_go_first_and_equals_in_order_of_arrival() -> None:
    one = cluster(0)
    for name, priority in (("r", 1), ("s", 0), ("t", 1), ("u", -(2**63)), ("v", 0)):
        one.arrive(query(name, priority=priority))
    assert one.serve(5) == ["u", "s", "v", "r", "t"]


def test_a_unit_of_priority_is_worth_the_aging_time() -> None:
    one = cluster(0, priority_aging_s=60.0)
    one.arrive(query("old", priority=1), 0.0)
    one.arrive(query("urgent", priority=0), 59.0)
    assert one.serve(1, 59.5) == ["urgent"]
    one.arrive(query("urgent", priority=0), 61.0)
    assert one.serve(2, 61.0) == ["old", "urgent"]


def test_without_aging_the_order_is_that_of_arrival() -> None:
    one = cluster(0, priority_aging_s=0.0)
    for name, priority in (("r", 5), ("s", -5), ("t", 0)):
        one.arrive(query(name, priority=priority))
    assert one.serve(3) == ["r", "s", "t"]


def test_an_old_flood_of_low_priority_gets_no_more_than_its_share() -> None:
    one = cluster(0, max_queued_requests=1000)
    for number in range(200):
        one.arrive(query(f"flood{number}", "flood", priority=3), 0.0)
    for number in range(20):
        one.arrive(query(f"urgent{number}", "x", priority=0), 1000.0)
    served = one.serve(20, 1000.0)
    assert abs(sum(name.startswith("urgent") for name in served) - 10) <= 1


def test_tenants_share_by_weight_whatever_they_send() -> None:
    one = cluster(0, tenants={"heavy": TenantLimits(weight=3.0)})
    for number in range(300):
        one.arrive(query(f"light{number}", "light"))
    for number in range(100):
        one.arrive(query(f"heavy{number}", "heavy"))
    served = one.serve(80)
    assert abs(sum(name.startswith("heavy") for name in served) - 60) <= 1
    assert served.index("light0") < 5


def test_output_counts_as_service_once_it_is_known() -> None:
    one = cluster(1)
    one.arrive(query("running", "other"))
    for number in range(10):
        one.arrive(query(f"x{number}", "x", tokens=10))
        one.arrive(query(f"y{number}", "y", tokens=10))
    one.finish("running")  # x0 goes
    one.finish("x0", num_output_tokens=50)  # counts as much as ten more of its prompts
    assert one.serve(1) == ["y1"]
    assert sum(name.startswith("x") for name in one.serve(8)) <= 1


def test_who_was_idle_has_saved_up_nothing() -> None:
    one = cluster(0)
    for number in range(100):
        one.arrive(query(f"x{number}", "x"))
    one.serve(50)
    for number in range(50):
        one.arrive(query(f"y{number}", "y"))
    assert abs(sum(name.startswith("y") for name in one.serve(20)) - 10) <= 1


def test_endless_newcomers_do_not_keep_out_who_was_served_before() -> None:
    one = cluster(0)
    numbers = itertools.count()
    for number in range(3):
        one.arrive(query(f"x{number}", "x"))
    served: list[str] = []
    for _ in range(20):
        one.arrive(query(f"new{next(numbers)}", f"tenant{next(numbers)}"))
        one.arrive(query(f"new{next(numbers)}", f"tenant{next(numbers)}"))
        served += one.serve(1)
    assert {"x0", "x1"} <= set(served)


def test_a_tenant_at_its_limit_is_passed_over_and_waits() -> None:
    one = cluster(5, tenants={"*": TenantLimits(max_running_requests=1), "free": TenantLimits()})
    for name, tenant in (("r", "x"), ("s", "x"), ("t", None), ("u", None), ("v", "free"), ("w", "free")):
        one.arrive(query(name, tenant))
    assert one.admission.num_running == 4
    assert one.let_go() == []
    assert one.finish("t") == ["u"]
    assert one.finish("r") == ["s"]
    one.admission.check()


def test_one_end_lets_one_request_of_a_limited_tenant_go_however_many_places_are_free() -> None:
    one = cluster(10, tenants={"x": TenantLimits(max_running_requests=2)})
    for number in range(6):
        one.arrive(query(f"r{number}", "x"))
    assert one.finish("r0") == ["r2"]
    assert one.finish("r1") == ["r3"]
    one.admission.check()


def test_a_limit_holds_for_all_models_and_other_routers() -> None:
    one = cluster(5, tenants={"x": TenantLimits(max_running_requests=2)})
    for _ in range(2):
        one.admission.adopt("elsewhere", "other-model", "x", 7, 0.0)
    assert one.arrive(query("r", "x")) is GO
    assert isinstance(one.arrive(query("s", "x")), Wait)
    one.admission.lose(7, 0.0)
    assert one.let_go() == ["s"]


def test_the_word_of_a_beginning_that_comes_after_the_end_leaves_nothing_behind() -> None:
    one = cluster(1)
    one.admission.finish("r", 0.0)
    one.admission.adopt("r", "m", "x", 7, 1.0)
    assert one.admission.num_running == 0
    assert one.arrive(query("r", "x"), 2.0) is GO
    assert one.finish("r", 3.0) == []


def test_what_found_its_place_by_another_router_waits_no_longer() -> None:
    one = cluster(0)
    one.arrive(query("r", "x", queue_timeout_s=1.0))
    one.admission.adopt("r", "m", "x", 7, 0.5)
    assert one.admission.expire(2.0) == []
    assert one.admission.of_tenant("x") == (1, 0)
    one.admission.check()


# ---- restrictions ----


def test_who_can_go_nowhere_does_not_block_others_and_is_first_where_he_may_go() -> None:
    one = Cluster(Admission(AdmissionConfig()), a=0, b=0)
    one.arrive(query("pinned", allowed_groups=("a",)))
    one.arrive(query("any"))
    one.places["b"] = 1
    assert one.let_go() == ["any"]
    one.arrive(query("other"))
    one.places["a"] = 1
    assert one.let_go() == ["pinned"]
    one.places["a"] = 1
    assert one.let_go() == ["other"]


def test_a_newcomer_takes_a_place_that_nobody_who_waits_can_have() -> None:
    one = Cluster(Admission(AdmissionConfig()), a=0, b=1)
    one.arrive(query("pinned", allowed_groups=("a",)))
    assert one.arrive(query("any")) is GO


def test_queries_that_are_alike_are_asked_about_once() -> None:
    one = Cluster(Admission(AdmissionConfig(max_queued_requests=20_000)), a=0, b=0)
    for number in range(10_000):
        one.arrive(query(f"r{number}", f"tenant{number % 100}", allowed_groups=("b",) if number % 2 else ()))
    one.num_asked = 0
    assert one.let_go() == []
    assert one.num_asked == 2


def test_of_very_many_restrictions_each_has_its_turn_to_be_asked_about() -> None:
    one = Cluster(Admission(AdmissionConfig()), a=0)
    names = [f"g{number}" for number in range(5 * MAX_ASKED)]
    for name in names:
        one.arrive(query(name, allowed_groups=(name,)))
    one.places[names[-1]] = 1
    looks = []
    for _ in range(6):
        one.num_asked = 0
        looks += one.let_go()
        assert one.num_asked <= 2 * MAX_ASKED
    assert looks == [names[-1]]


# ---- how fast places come free ----


def test_the_drain_is_measured_only_while_somebody_waits() -> None:
    drain = Drain()
    assert drain.per_s(0.0, 0.0) == 0.0
    assert drain.per_s(0.0, 3.0) == pytest.approx(3.0)
    drain.note_end(100.0)
    assert drain.per_s(100.0, 3.0) == pytest.approx(3.0)
    drain.wait(100.0)
    for tenth in range(1, 3001):
        drain.note_end(100.0 + tenth / 10)
    assert drain.per_s(400.0, 3.0) == pytest.approx(10.0, rel=0.01)
    drain.rest(400.0)
    assert drain.per_s(10_000.0, 3.0) == pytest.approx(10.0, rel=0.01)


def test_an_estimated_wait_is_near_what_it_becomes() -> None:
    one = cluster(4, tenants={"*": TenantLimits(weight=1.0)})
    now, ends = 0.0, []
    for number in range(200):
        if one.arrive(query(f"r{number}", f"t{number % 3}"), now) is GO:
            ends.append(f"r{number}")
    one.admission.expect_drain("m", 1.0)  # wrong by a factor of 4
    for _ in range(100):
        now += 0.25
        ends += one.finish(ends.pop(0), now)
    expected = one.admission.arrive(query("last", "t0"), now, one.can_place)
    assert isinstance(expected, Wait)
    began = now
    while "last" not in ends:
        now += 0.25
        ends += one.finish(ends.pop(0), now)
    assert expected.expected_s == pytest.approx(now - began, rel=0.2)


# ---- properties ----


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=30, max_size=60),
    st.floats(0.25, 4.0),
    st.floats(0.25, 4.0),
)
@settings(max_examples=50, deadline=None)
def test_two_that_wait_all_the_time_are_served_equally_within_one_request_of_each(
    sizes: list[tuple[int, int]], weight_x: float, weight_y: float
) -> None:
    weights = {"x": weight_x, "y": weight_y}
    one = cluster(0, tenants={name: TenantLimits(weight=weight) for name, weight in weights.items()})
    tokens: dict[str, int] = {}
    for number, pair in enumerate(sizes):
        for tenant, size in zip("xy", pair, strict=True):
            tokens[f"{tenant}{number}"] = size
            one.arrive(query(f"{tenant}{number}", tenant, tokens=size))
    bound = sum(max(pair[side] for pair in sizes) / weights[name] for side, name in enumerate("xy"))
    service: defaultdict[str, float] = defaultdict(float)
    left = dict.fromkeys("xy", len(sizes))
    while min(left.values()) > 0:
        (name,) = one.serve(1)
        service[name[0]] += tokens[name] / weights[name[0]]
        left[name[0]] -= 1
        if min(left.values()) > 0:
            assert abs(service["x"] - service["y"]) <= bound * (1 + 1e-9)


AGING_S = 10.0
LIMITS = {"x": TenantLimits(2.0, 2, 3), "y": TenantLimits(0.5, None, 4), "*": TenantLimits(1.0, 3, None)}


class AdmissionMachine(RuleBasedStateMachine):
    """Against lists: who waits and runs, and who could not have been passed."""

    def __init__(self) -> None:
        super().__init__()
        config = AdmissionConfig(max_queued_requests=8, tenants=LIMITS, priority_aging_s=AGING_S)
        self.cluster = Cluster(Admission(config), a=1, b=1)
        self.admission = self.cluster.admission
        self.now = 0.0
        self.waiting: dict[str, tuple[RouteQuery, float]] = {}
        self.running: dict[str, str | None] = {}
        self.elsewhere: set[str] = set()
        self.numbers = itertools.count()

    @rule(
        tenant=st.sampled_from([None, "x", "y", "z"]),
        priority=st.integers(-1, 2),
        allowed=st.sampled_from([(), ("a",), ("b",), ("c",)]),
        excluded=st.sampled_from([(), ("a",)]),
        tokens=st.integers(0, 50),
        queue_timeout_s=st.sampled_from([None, 4.0, 20.0]),
        timeout_s=st.sampled_from([None, 6.0]),
    )
    def arrives(self, tenant: str | None, tokens: int, allowed: tuple[str, ...], **fields: Any) -> None:
        fields["excluded_groups"] = fields.pop("excluded")
        one = query(f"r{next(self.numbers)}", tenant, tokens=tokens, allowed_groups=allowed, **fields)
        has_place, may_run = bool(self.cluster.groups_for(one)), self.may_run(tenant)
        num_own = sum(each.tenant == tenant for each, _ in self.waiting.values())
        verdict = self.cluster.arrive(one, self.now)
        limit = self.limits(tenant).max_queued_requests
        if verdict is GO:
            assert has_place
            assert may_run
            self.running[one.request_id] = tenant
        elif isinstance(verdict, Wait):
            assert not has_place or not may_run
            assert len(self.waiting) < 8
            assert limit is None or num_own < limit
            self.waiting[one.request_id] = one, self.now
        elif verdict.reason is RefusalReason.TENANT_LIMIT:
            assert num_own == limit
        elif verdict.reason is RefusalReason.QUEUE_FULL:
            assert len(self.waiting) == 8
        else:
            assert verdict.reason is RefusalReason.DEADLINE
            assert not (has_place and may_run)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_output_tokens=st.integers(0, 100), is_cancelled=st.booleans())
    def ends(self, data: st.DataObject, num_output_tokens: int, is_cancelled: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[name]
        if name in self.elsewhere:
            self.elsewhere.discard(name)
        else:
            self.cluster.places[self.cluster.group_of.pop(name)] += 1
        if is_cancelled:
            assert self.admission.cancel(name, self.now)
        else:
            self.admission.finish(name, self.now, num_output_tokens)
        self.drain()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), is_adopted=st.booleans())
    def leaves(self, data: st.DataObject, is_adopted: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        one, _ = self.waiting.pop(name)
        if is_adopted:
            self.admission.adopt(name, "m", one.tenant, 99, self.now)
            self.running[name] = one.tenant
            self.elsewhere.add(name)
        else:
            assert self.admission.cancel(name, self.now)

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for refusal in self.admission.expire(self.now):
            one, arrived_s = self.waiting.pop(refusal.request_id)
            assert self.now >= arrived_s + min(one.queue_timeout_s or 1e9, one.timeout_s or 1e9)
        for one, arrived_s in self.waiting.values():
            assert self.now < arrived_s + min(one.queue_timeout_s or 1e9, one.timeout_s or 1e9)

    @rule(group=st.sampled_from("abc"))
    def a_place_is_added(self, group: str) -> None:
        if sum(self.cluster.places.values()) < 5:
            self.cluster.places[group] = self.cluster.places.get(group, 0) + 1
            self.drain()

    @rule()
    def the_other_router_is_lost(self) -> None:
        self.admission.lose(99, self.now)
        for name in self.elsewhere:
            del self.running[name]
        self.elsewhere.clear()
        self.drain()

    def drain(self) -> None:
        while (taken := self.admission.take_next("m", self.cluster.can_place, self.now)) is not None:
            one, arrived_s = self.waiting[taken.request_id]
            assert taken is one
            assert self.is_possible(one)
            urgency = one.priority - (self.now - arrived_s) / AGING_S
            for other, other_arrived_s in self.waiting.values():
                if other is not one and self.is_possible(other):
                    assert urgency <= other.priority or one.priority <= other.priority
                    is_alike = (other.tenant, other.priority) == (one.tenant, one.priority)
                    if is_alike and restriction(other) == restriction(one):
                        assert arrived_s <= other_arrived_s
            del self.waiting[one.request_id]
            self.running[one.request_id] = one.tenant
            self.cluster.place(one)
        assert not any(self.is_possible(one) for one, _ in self.waiting.values())

    def is_possible(self, one: RouteQuery) -> bool:
        return bool(self.cluster.groups_for(one)) and self.may_run(one.tenant)

    def may_run(self, tenant: str | None) -> bool:
        limit = self.limits(tenant).max_running_requests
        return limit is None or list(self.running.values()).count(tenant) < limit

    @staticmethod
    def limits(tenant: str | None) -> TenantLimits:
        return LIMITS.get(tenant or "*", LIMITS["*"])

    @invariant()
    def the_books_agree(self) -> None:
        self.admission.check()
        assert self.admission.num_waiting == len(self.waiting)
        assert self.admission.num_running == len(self.running)


AdmissionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAdmission = AdmissionMachine.TestCase


def test_in_any_long_overload_everybody_who_waits_is_served_in_the_end() -> None:
    one, rng = cluster(0, max_queued_requests=10_000, priority_aging_s=1.0), random.Random(1)
    waiting, now = {}, 0.0
    for number in range(3000):
        now += 0.01
        name = f"r{number}"
        one.arrive(query(name, rng.choice("abcdef"), priority=rng.randrange(4), tokens=rng.randrange(1, 500)), now)
        waiting[name] = now
        if number >= 300:
            for served in one.serve(1, now):
                assert now - waiting.pop(served) < 15.0
    assert all(now - since < 15.0 for since in waiting.values())
