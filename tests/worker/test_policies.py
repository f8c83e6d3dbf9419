"""Who is served first, and what each policy promises."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.worker.errors import ConfigurationError
from octavo.worker.fair_queue import DECODE_WEIGHT, PREFILL_WEIGHT, FairQueue
from octavo.worker.messages import Request, SamplingParams
from octavo.worker.policies import (
    S_PER_TOKEN,
    SCHEDULING_POLICIES,
    FirstCome,
    PriorityOrder,
    ShortestRemaining,
    make_queue,
)
from octavo.worker.sequence import Sequence, SequenceStatus
from octavo.worker.waiting_queue import Order, WaitingQueue

PRIORITIES = st.integers(-(2**63), 2**63 - 1)


def sequence(
    arrival: int,
    *,
    at_s: float = 0.0,
    num_prompt_tokens: int = 10,
    max_tokens: int = 20,
    output: tuple[int, ...] = (),
    **fields: Any,
) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    request = Request(str(arrival), "g", "m", tuple(range(num_prompt_tokens)), b"", sampling, **fields)
    return Sequence.start(request, [0], output, arrival=arrival, now=at_s)


def ordered(order: Order, *sequences: Sequence) -> list[int]:
    """Arrivals, in the order of service."""
    return [each.arrival for each in sorted(sequences, key=lambda each: (order.key(each), each.arrival))]


# ---- by name ----


def test_every_policy_has_a_name() -> None:
    assert SCHEDULING_POLICIES == ("fcfs", "priority", "shortest", "fair")
    assert [make_queue(policy).counts_service for policy in SCHEDULING_POLICIES] == [False, False, False, True]


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(ConfigurationError, match=r"scheduling policy is 'lifo'.*one of fcfs, priority, shortest, fair"):
        make_queue("lifo")


@pytest.mark.parametrize("aging_s", [-1.0, math.inf, math.nan])
def test_aging_takes_a_finite_time(aging_s: float) -> None:
    with pytest.raises(ConfigurationError, match=f"aging_s is {aging_s}"):
        make_queue("priority", aging_s=aging_s)


# ---- first come, priority ----


def test_first_come_does_not_look_at_priority() -> None:
    assert ordered(FirstCome(), sequence(0, priority=9), sequence(1, priority=-9)) == [0, 1]


def test_lower_priority_values_first_and_in_one_of_them_first_come() -> None:
    waiting = [sequence(0, priority=1), sequence(1), sequence(2, priority=-1), sequence(3)]
    assert ordered(PriorityOrder(), *waiting) == [2, 1, 3, 0]


def test_a_unit_of_priority_is_made_up_for_by_waiting() -> None:
    order, low = PriorityOrder(aging_s=60.0), sequence(0, priority=1)
    assert ordered(order, low, sequence(1, at_s=59.9)) == [1, 0]
    assert ordered(order, low, sequence(1, at_s=60.1)) == [0, 1]
    assert ordered(PriorityOrder(aging_s=0.0), low, sequence(1, at_s=0.1)) == [0, 1]


@given(
    PRIORITIES,
    st.lists(st.floats(0, 1e9), min_size=2, max_size=5).map(sorted),
    st.sampled_from([PriorityOrder(), ShortestRemaining()]),
)
def test_equal_priorities_are_first_come_whatever_their_value(
    priority: int, times: list[float], order: PriorityOrder | ShortestRemaining
) -> None:
    waiting = [sequence(arrival, at_s=at_s, priority=priority) for arrival, at_s in enumerate(times)]
    assert ordered(order, *reversed(waiting)) == list(range(len(times)))


@given(PRIORITIES, PRIORITIES, st.floats(0, 59.0))
@example(2**63 - 1, 2**63 - 2, 0.0)
@example(-(2**63), 2**63 - 1, 59.0)
def test_a_more_urgent_one_goes_first_if_it_comes_within_the_aging_time(one: int, other: int, at_s: float) -> None:
    low, high = sequence(0, priority=max(one, other)), sequence(1, at_s=at_s, priority=min(one, other))
    assert ordered(PriorityOrder(aging_s=60.0), low, high) == ([0, 1] if one == other else [1, 0])


# ---- shortest ----


def test_the_shortest_first() -> None:
    long, short = sequence(0, num_prompt_tokens=100), sequence(1, num_prompt_tokens=99)
    assert ordered(ShortestRemaining(), long, short) == [1, 0]
    assert ordered(ShortestRemaining(), sequence(0, max_tokens=21), sequence(1)) == [1, 0]


def test_what_is_cached_need_not_be_computed() -> None:
    cached = sequence(1, num_prompt_tokens=500, expected_cached_tokens=496)
    assert ordered(ShortestRemaining(), sequence(0), cached) == [1, 0]


def test_what_was_generated_need_not_be_generated_again() -> None:
    """But it has to be computed, when its blocks are gone: together the same work, which is not more than before."""
    assert ordered(ShortestRemaining(), sequence(0), sequence(1, output=(1, 2, 3))) == [0, 1]
    came_back = sequence(1, output=(1, 2, 3))
    came_back.num_computed_tokens = 12
    assert ordered(ShortestRemaining(), sequence(0), came_back) == [1, 0]


def test_priority_counts_before_length() -> None:
    assert ordered(ShortestRemaining(), sequence(0), sequence(1, num_prompt_tokens=900, priority=-1)) == [1, 0]


def test_a_long_one_has_its_turn_after_a_bounded_time() -> None:
    long = sequence(0, num_prompt_tokens=1010)
    turn_s = 1000 * S_PER_TOKEN
    assert ordered(ShortestRemaining(), long, sequence(1, at_s=turn_s - 0.1)) == [1, 0]
    assert ordered(ShortestRemaining(), long, sequence(1, at_s=turn_s + 0.1)) == [0, 1]


# ---- fair ----


def fair(*sequences: Sequence) -> FairQueue:
    queue = FairQueue(PriorityOrder())
    for each in sequences:
        queue.add(each)
    return queue


def take(queue: WaitingQueue) -> Sequence:
    first = queue.first()
    assert first is not None
    queue.remove(first)
    return first


def test_the_tenant_served_least_is_next() -> None:
    queue = fair(sequence(0, tenant="a"), sequence(1, tenant="a"), sequence(2, tenant="b"), sequence(3))
    assert [take(queue).arrival for _ in range(4)] == [0, 2, 3, 1]  # they take turns within one step as well


def test_a_step_that_computed_less_than_a_prompt_is_counted_as_such() -> None:
    one = sequence(0, tenant="a", num_prompt_tokens=100)
    queue = fair(one, sequence(1, tenant="a"), sequence(2, tenant="b"))
    assert take(queue) is one
    queue.note_served(one, 1, 0)
    assert [take(queue).arrival for _ in range(2)] == [2, 1]
    queue = fair(one, sequence(1, tenant="a"), sequence(2, tenant="b"))
    queue.note_served(sequence(3, tenant="b"), 2, 0)
    assert take(queue) is one
    queue.note_served(one, 1, 0)
    assert take(queue).arrival == 1


def test_what_ends_while_it_waits_was_not_served() -> None:
    ended = sequence(0, tenant="a", num_prompt_tokens=1000)
    queue = fair(ended, sequence(1, tenant="a"), sequence(2, tenant="b"))
    ended.status = SequenceStatus.FINISHED
    queue.remove(ended)
    assert [take(queue).arrival for _ in range(2)] == [1, 2]


def test_what_comes_back_while_a_step_is_planned_does_not_upset_the_turns() -> None:
    queue = fair(*(sequence(number, tenant="a") for number in range(3)), sequence(3, tenant="b"))
    assert take(queue).arrival == 0
    queue.add(sequence(4, tenant="b"))
    assert [take(queue).arrival for _ in range(4)] == [3, 1, 4, 2]


def test_decoded_tokens_weigh_more() -> None:
    a, b = sequence(0, tenant="a"), sequence(1, tenant="b")
    queue = fair(a, b)
    queue.note_served(a, 0, 2)
    queue.note_served(b, 3, 0)
    assert queue.in_order(2) == [b, a]


def test_within_a_tenant_priority_counts() -> None:
    queue = fair(sequence(0, tenant="a"), sequence(1, tenant="a", priority=-1), sequence(2, tenant="b", priority=-2))
    assert [each.arrival for each in queue.in_order(3)] == [2, 1, 0]


def test_idling_saves_nothing_up() -> None:
    busy = [sequence(number, tenant="busy") for number in range(9)]
    queue = fair(*busy)
    for _ in range(4):
        queue.note_served(take(queue), 1000, 0)
    for number in range(10, 19):
        queue.add(sequence(number, tenant="idle until now"))
    assert [take(queue).arrival for _ in range(6)] == [4, 10, 5, 11, 6, 12]


def test_idling_saves_nothing_up_either_when_nobody_waits() -> None:
    queue, busy = fair(sequence(0, tenant="busy")), sequence(1, tenant="busy")
    queue.note_served(take(queue), 1000, 0)  # after it has left: its counter now is what counts
    queue.add(sequence(2, tenant="idle until now", num_prompt_tokens=5))
    queue.add(busy)
    queue.add(sequence(3, tenant="idle until now"))
    assert [take(queue).arrival for _ in range(3)] == [1, 2, 3]


def test_a_pause_does_not_make_up_for_what_was_served() -> None:
    queue = fair(sequence(0, tenant="greedy"), sequence(1, tenant="modest"), sequence(2, tenant="modest"))
    queue.note_served(take(queue), 1000, 0)
    queue.add(sequence(3, tenant="greedy", priority=-5))
    assert [take(queue).arrival for _ in range(3)] == [1, 2, 3]


def test_tenants_that_come_and_go_are_forgotten() -> None:
    queue = fair()
    running: list[Sequence] = []
    for number in range(5000):
        queue.add(sequence(number, tenant=f"tenant {number}"))
        running = [*running[-15:], take(queue)]
        for each in running:
            queue.note_served(each, 0, 1)
    assert queue.num_tenants <= 2 * 64 + 32


def test_tenants_that_only_abort_are_forgotten() -> None:
    queue = fair()
    for number in range(5000):
        each = sequence(number, tenant=f"tenant {number}")
        queue.add(each)
        queue.remove(each)
    assert queue.num_tenants <= 2 * 64 + 32


def test_who_is_being_served_is_not_forgotten() -> None:
    queue, steady = fair(), sequence(0, tenant="steady")
    for number in range(1, 1000):
        queue.note_served(steady, 0, 1)
        newcomer = sequence(number, tenant=f"tenant {number}")
        queue.add(newcomer)
        queue.note_served(take(queue), 5000, 0)
    assert "steady" in queue._tenants
    assert queue._tenants["steady"].served == 999 * DECODE_WEIGHT


@dataclass
class Server:
    """Serves two tenants that always have something waiting; a sequence holds its final length from admission on."""

    queue: WaitingQueue
    rng: random.Random
    num_pool_tokens: int
    num_step_tokens: int
    longest: dict[str, tuple[int, int]]
    """Tenant → prompt and output tokens at the most."""
    running: dict[Sequence, int] = field(default_factory=dict)
    """→ its length at its end."""
    service: dict[str, int] = field(default_factory=lambda: {"a": 0, "b": 0})
    num_arrivals: int = 0

    def send(self, tenant: str) -> None:
        most_prompt, most_output = self.longest[tenant]
        num_prompt, num_output = self.rng.randint(1, most_prompt), self.rng.randint(1, most_output)
        each = sequence(self.num_arrivals, num_prompt_tokens=num_prompt, max_tokens=num_output, tenant=tenant)
        self.num_arrivals += 1
        self.queue.add(each)

    def step(self) -> None:
        self.admit()
        budget, served = self.num_step_tokens, []
        for each in list(self.running):
            num_tokens = min(each.num_uncomputed_tokens, budget)
            budget -= num_tokens
            each.num_computed_tokens += num_tokens
            if num_tokens and each.num_uncomputed_tokens == 0:
                each.token_ids.append(9)
            num_prefill = min(num_tokens, max(each.num_prompt_tokens - each.num_computed_tokens + num_tokens, 0))
            served.append((each, num_prefill, num_tokens - num_prefill))
            if each.num_tokens > self.running[each]:
                del self.running[each]
        for each, num_prefill, num_decode in served:
            self.queue.note_served(each, num_prefill, num_decode)
            self.service[each.request.tenant or ""] += PREFILL_WEIGHT * num_prefill + DECODE_WEIGHT * num_decode

    def admit(self) -> None:
        while (first := self.queue.first()) is not None:
            length = first.num_prompt_tokens + first.request.sampling.max_tokens
            if sum(self.running.values()) + length > self.num_pool_tokens:
                return
            self.send(first.request.tenant or "")  # before: one of its tenant waits at any time
            self.queue.remove(first)
            self.running[first] = length

    def largest_difference(self, num_steps: int) -> int:
        """Of the service of both in any interval."""
        differences = [0]
        for _ in range(num_steps):
            self.step()
            differences.append(self.service["a"] - self.service["b"])
        return max(differences) - min(differences)


LENGTHS = st.tuples(st.integers(1, 40), st.integers(1, 40))


def start_server(queue: WaitingQueue, seed: int, a: tuple[int, int], b: tuple[int, int], pool: int) -> Server:
    server = Server(queue, random.Random(seed), pool, 32, {"a": a, "b": b})
    for tenant in "ab":
        for _ in range(3 if tenant == "a" else 1):
            server.send(tenant)
    return server


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), LENGTHS, LENGTHS, st.integers(80, 400))
def test_two_backlogged_tenants_are_served_equally_up_to_a_bound(
    seed: int, a: tuple[int, int], b: tuple[int, int], pool: int
) -> None:
    server = start_server(make_queue("fair"), seed, a, b, pool)
    bound = 2 * max(PREFILL_WEIGHT * max(a[0], b[0]), DECODE_WEIGHT * pool)
    assert server.largest_difference(300) <= bound


def test_first_come_would_not_keep_that_bound() -> None:
    server = start_server(make_queue("fcfs"), 0, (40, 40), (2, 2), 100)
    assert server.largest_difference(300) > 2 * DECODE_WEIGHT * 100
