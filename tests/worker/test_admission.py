"""Admission: how much may wait, counted across two threads, without drift."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.admission import Admission, Bound, Refusal
from octavo.worker.messages import Request, SamplingParams
from octavo.worker.speed import SpeedMeter


class Queue:
    """What admission sees of an engine: requests wait, in the order in which it took them."""

    def __init__(self, prefill_tokens_per_s: float = 0.0, *, free_slots: int = 0, free_blocks: int = 0) -> None:
        self.waiting: list[Request] = []
        self.free_slots, self.free_blocks = free_slots, free_blocks
        self.speed = SpeedMeter()
        if prefill_tokens_per_s:
            self.speed.note(1_000, 0, 1_000 / prefill_tokens_per_s)

    @property
    def scheduler(self) -> Any:
        num_tokens = sum(len(request.prompt_token_ids) for request in self.waiting)
        return SimpleNamespace(
            num_queued_requests=len(self.waiting),
            num_queued_tokens=num_tokens,
            num_uncomputed_prompt_tokens=num_tokens,
            num_free_slots=self.free_slots,
            num_coming_blocks=self.free_blocks,
            limits=SimpleNamespace(block_size=16),
        )


def request(num_tokens: int = 4) -> Request:
    return Request("r", "g", "m", (1,) * num_tokens, b"", SamplingParams(max_tokens=1, seed=0))


def note(admission: Admission, queue: Queue, *taken: Request) -> None:
    queue.waiting += taken
    admission.note(queue, taken)  # type: ignore[arg-type]


def test_without_bounds_nothing_is_refused() -> None:
    admission = Admission(None, None)
    assert all(admission.let_in(request(10_000)) is None for _ in range(1_000))
    assert admission.num_refused == {Bound.REQUESTS: 0, Bound.TOKENS: 0}


def test_requests_on_their_way_and_those_in_the_engines_queue_count_together() -> None:
    admission, queue = Admission(8, None), Queue()
    first = [request() for _ in range(5)]
    for each in first:
        assert admission.let_in(each) is None
    note(admission, queue, *first[:3])
    for _ in range(3):
        assert admission.let_in(request()) is None
    refusal = admission.let_in(request())
    assert refusal == Refusal("--max-queued-requests is 8 and 8 requests wait", 1.0)
    queue.waiting.pop()
    note(admission, queue)
    assert admission.let_in(request()) is None
    assert admission.num_refused == {Bound.REQUESTS: 1, Bound.TOKENS: 0}


def test_tokens_of_the_prompts_that_wait_are_bounded() -> None:
    admission = Admission(None, 100)
    assert admission.let_in(request(60)) is None
    assert admission.let_in(request(40)) is None
    refusal = admission.let_in(request(1))
    assert refusal is not None
    assert refusal.message == "--max-queued-tokens is 100, prompts of 100 tokens wait and this one has 1"
    assert admission.num_refused == {Bound.REQUESTS: 0, Bound.TOKENS: 1}


def test_what_the_batch_has_room_for_does_not_wait_and_is_not_refused() -> None:
    admission, queue = Admission(2, None), Queue(free_slots=5, free_blocks=2)
    note(admission, queue)
    assert all(admission.let_in(request(4)) is None for _ in range(5))  # a burst on an idle engine
    assert admission.let_in(request(4)) is not None  # five slots are spoken for
    admission = Admission(2, None)
    note(admission, queue)
    assert admission.let_in(request(30)) is None
    assert admission.let_in(request(2)) is None  # the pool holds 32 tokens
    assert admission.let_in(request(1)) is not None
    queue.waiting.append(request())  # somebody waits although slots are free: for memory
    note(admission, queue)
    assert admission.let_in(request(1)) is not None


def test_with_nothing_queued_a_request_of_any_length_is_let_in() -> None:
    admission, queue = Admission(1, 100), Queue()
    long = request(5_000)
    assert admission.let_in(long) is None
    note(admission, queue, long)
    refusal = admission.let_in(request(1))
    assert refusal is not None
    assert refusal.message == "--max-queued-requests is 1 and 1 request waits"
    queue.waiting.clear()
    note(admission, queue)
    assert admission.let_in(request(5_000)) is None


@pytest.mark.parametrize(
    ("tokens_per_s", "seconds"), [(0.0, 1.0), (1e6, 1.0), (100.0, 30.0), (1.0, 60.0)], ids=["unknown", "", "", ""]
)
def test_when_to_try_again_is_when_the_prompts_that_wait_are_computed(tokens_per_s: float, seconds: float) -> None:
    admission, queue = Admission(2, None), Queue(tokens_per_s)
    taken = request(2_000)
    admission.let_in(taken)
    note(admission, queue, taken)
    admission.let_in(request(1_000))
    refusal = admission.let_in(request())
    assert refusal is not None
    assert refusal.retry_after_s == seconds


@given(st.lists(st.tuples(st.sampled_from(["submit", "take", "end", "note"]), st.integers(1, 30)), max_size=80))
def test_the_counts_never_drift(steps: list[tuple[str, int]]) -> None:
    """Whatever is submitted, taken, and ended or admitted in between, what is counted is what waits, and in the end
    nothing does."""
    admission, queue = Admission(6, 80), Queue()
    on_way: list[Request] = []
    noted: list[Request] = []  # queued in the engine when it was looked at last

    def look(*taken: Request) -> None:
        nonlocal noted
        note(admission, queue, *taken)
        noted = list(queue.waiting)

    def check() -> None:
        queued = on_way + noted
        assert admission.num_queued_requests == len(queued)
        assert admission.num_queued_tokens == sum(len(each.prompt_token_ids) for each in queued)

    for name, size in steps:
        if name == "submit":
            num_requests, num_tokens = len(on_way + noted), admission.num_queued_tokens
            has_room = num_requests == 0 or (num_requests < 6 and num_tokens + size <= 80)
            wanted = request(size)
            assert (admission.let_in(wanted) is None) is has_room
            on_way += [wanted] if has_room else []
        elif name == "take" and on_way:
            look(on_way.pop(0))
        elif name == "end" and queue.waiting:
            queue.waiting.pop(size % len(queue.waiting))
        elif name == "note":
            look()
        check()
    taken, on_way = on_way, []
    look(*taken)
    queue.waiting.clear()
    look()
    check()
    assert (admission.num_queued_requests, admission.num_queued_tokens) == (0, 0)
