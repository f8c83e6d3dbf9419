"""Waiting queues: any order, any mix of what comes, goes and comes back; each sequence is there exactly once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.worker.messages import Request, SamplingParams
from octavo.worker.policies import FirstCome, PriorityOrder, make_queue
from octavo.worker.sequence import Sequence
from octavo.worker.waiting_queue import HeapQueue, KeyedHeap, WaitingQueue, expected_prefill_tokens


def sequence(arrival: int, *, branch: int = 0, at_s: float = 0.0, **fields: Any) -> Sequence:
    """With a prompt of 10 tokens, and up to 20 tokens to come."""
    sampling = SamplingParams(max_tokens=20, seed=0)
    request = Request(str(arrival), "g", "m", tuple(range(10)), b"", sampling, **fields)
    return Sequence.start(request, [branch], (), arrival=arrival, now=at_s)


def take_all(queue: WaitingQueue) -> list[Sequence]:
    """As a scheduler does that admits one after the other."""
    taken = []
    while (first := queue.first()) is not None:
        queue.remove(first)
        taken.append(first)
    return taken


# ---- one at a time ----


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_an_empty_queue(policy: str) -> None:
    queue = make_queue(policy)
    assert (len(queue), list(queue), queue.first(), queue.in_order(3)) == (0, [], None, [])


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest", "fair"])
def test_equals_come_in_the_order_of_arrival_and_branch(policy: str) -> None:
    queue = make_queue(policy)
    expected = [sequence(arrival, branch=branch) for arrival in range(3) for branch in range(3)]
    for each in reversed(expected):
        queue.add(each)
    assert take_all(queue) == expected


def test_sequences_that_nothing_tells_apart_are_not_compared() -> None:
    queue = HeapQueue(FirstCome())
    twins = [sequence(0) for _ in range(3)]
    for twin in twins:
        queue.add(twin)
    assert take_all(queue) == twins


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_what_does_not_wait_cannot_be_removed(policy: str) -> None:
    queue = make_queue(policy)
    each = sequence(0)
    with pytest.raises(KeyError):
        queue.remove(each)
    queue.add(each)
    queue.remove(each)
    with pytest.raises(KeyError):
        queue.remove(each)
    assert len(queue) == 0


def test_the_place_is_judged_anew_when_a_sequence_comes_back() -> None:
    queue = make_queue("shortest")
    one, other = sequence(0), sequence(1)
    other.num_computed_tokens = 5
    queue.add(one)
    queue.add(other)
    assert queue.first() is other
    queue.remove(other)
    other.num_computed_tokens = 0
    queue.add(other)
    assert queue.first() is one


def test_looking_ahead_takes_nothing_out() -> None:
    queue = HeapQueue(PriorityOrder())
    each = [sequence(arrival, priority=-arrival) for arrival in range(20)]
    for one in each:
        queue.add(one)
    assert queue.in_order(3) == each[:-4:-1]
    assert queue.in_order(100) == each[::-1]
    assert queue.in_order(0) == []
    assert len(queue) == 20


def test_what_has_gone_takes_no_more_memory_than_what_waits() -> None:
    heap: KeyedHeap[int] = KeyedHeap()
    for number in range(1000):
        heap.put(number, (number,))
    for number in range(999, 9, -1):
        heap.discard(number)
        assert len(heap._heap) <= 2 * len(heap)
    for number in range(10):
        for key in range(50):
            heap.put(number, (key,))
            assert len(heap._heap) <= 2 * len(heap)
    assert list(heap.ordered()) == list(range(10))


def test_prefill_to_expect() -> None:
    each = sequence(0, expected_cached_tokens=6)
    assert expected_prefill_tokens(each) == 4
    resumed = Sequence.start(each.request, [0], (1,), arrival=0, now=0.0)  # what the router expects was for the prompt
    assert expected_prefill_tokens(resumed) == 11
    assert expected_prefill_tokens(sequence(0, expected_cached_tokens=10)) == 1


# ---- any mix ----


class QueueMachine(RuleBasedStateMachine):
    """Against a plain list. For the fair queue the order is its own; what is there, and how often, is not."""

    policy = "priority"

    def __init__(self) -> None:
        super().__init__()
        self.queue = make_queue(self.policy)
        self.waiting: list[Sequence] = []
        self.gone: list[Sequence] = []
        self.num_arrivals = 0

    @rule(priority=st.integers(-2, 2), tenant=st.sampled_from([None, "a", "b"]), at_s=st.integers(0, 200))
    def add_new(self, priority: int, tenant: str | None, at_s: int) -> None:
        each = sequence(self.num_arrivals, at_s=at_s, priority=priority, tenant=tenant)
        self.num_arrivals += 1
        self.queue.add(each)
        self.waiting.append(each)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def add_again(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.gone))
        self.gone.remove(each)
        self.queue.add(each)
        self.waiting.append(each)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove_any(self, data: st.DataObject) -> None:
        self._remove(data.draw(st.sampled_from(self.waiting)))

    @precondition(lambda self: self.waiting)
    @rule()
    def remove_first(self) -> None:
        first = self.queue.first()
        assert first is not None
        self._remove(first)

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), num_prefill_tokens=st.integers(0, 10), num_decode_tokens=st.integers(0, 1))
    def serve(self, data: st.DataObject, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        self.queue.note_served(data.draw(st.sampled_from(self.gone)), num_prefill_tokens, num_decode_tokens)

    @rule(num_taken=st.integers(1, 6))
    def look_ahead_and_take(self, num_taken: int) -> None:
        expected = self.queue.in_order(num_taken)
        assert len(expected) == min(num_taken, len(self.waiting))
        for each in expected:
            assert self.queue.first() is each
            self._remove(each)

    def _remove(self, each: Sequence) -> None:
        self.queue.remove(each)
        self.waiting.remove(each)
        self.gone.append(each)

    @invariant()
    def holds_each_once(self) -> None:
        assert len(self.queue) == len(self.waiting)
        by_arrival = sorted(self.waiting, key=lambda each: each.arrival)
        assert sorted(self.queue, key=lambda each: each.arrival) == by_arrival

    @invariant()
    def is_in_order(self) -> None:
        if self.policy == "priority":
            order = PriorityOrder()
            expected = sorted(self.waiting, key=lambda each: (order.key(each), each.arrival))
            assert self.queue.in_order(4) == expected[:4]


class FairQueueMachine(QueueMachine):
    policy = "fair"


TestQueueMachine = QueueMachine.TestCase
TestFairQueueMachine = FairQueueMachine.TestCase
TestQueueMachine.settings = TestFairQueueMachine.settings = settings(max_examples=60, deadline=None)
