"""The report book: what the router must know is repeated until it knows it, and never without bound."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from octavo.worker import report_book
from octavo.worker.engine import Engine
from octavo.worker.messages import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    GroupReport,
    KVEvents,
    Request,
    RequestProgress,
    SamplingParams,
)
from octavo.worker.report_book import GroupIdentity, ReportBook
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.sampling_row import SamplingRow, StepResult
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.step_plan import StepPlan

GENERATION = 17
HASHER = RoutingHasher(bytes(16), 4)


class Model:
    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        future.set_result(StepResult([row.position for row in rows]))
        return future


class Bench:
    """An engine of 8 blocks of 4 tokens, and its book."""

    def __init__(self, num_blocks: int = 8) -> None:
        scheduler = Scheduler(SchedulerLimits(num_blocks, 4, 4, 64, 32), HASHER)
        self.engine = Engine(scheduler, Model(), clock=lambda: 0.0, emit=lambda gateway, update: None)
        self.num_rendered = 0
        identity = GroupIdentity("model", "group", GENERATION, 4, num_blocks, 4)
        self.book = ReportBook(identity, self._render)

    def _render(self, engine: Engine) -> str:
        self.num_rendered += 1
        return f"metrics {self.num_rendered}"

    def run(self, name: str, first_token: int, *, num_tokens: int = 5, max_tokens: int = 1) -> None:
        """A request from its arrival to its end."""
        prompt = tuple(range(first_token, first_token + num_tokens))
        self.engine.submit(Request(name, "g", "model", prompt, (), SamplingParams(max_tokens=max_tokens, seed=0)))
        while self.engine.step():
            self.book.collect(self.engine)

    def held(self) -> set[int]:
        return hashes(self.engine.scheduler.cache.snapshot())


def hashes(events: tuple[BlocksStored, ...]) -> set[int]:
    return {value for event in events for value in event.hashes}


def replay(messages: tuple[KVEvents, ...], known: set[int] | None = None) -> set[int]:
    """What a router knows after these messages."""
    known = set() if known is None else known
    for message in messages:
        if message.is_snapshot:
            known.clear()
        for event in message.events:
            if isinstance(event, BlocksStored):
                known |= set(event.hashes)
            elif isinstance(event, BlocksRemoved):
                known -= set(event.hashes)
            else:
                known.clear()
    return known


def test_the_first_report_says_who_we_are() -> None:
    report = Bench().book.take()
    assert (report.model, report.group, report.generation) == ("model", "group", GENERATION)
    assert (report.num_blocks, report.num_free_blocks, report.max_num_seqs) == (8, 8, 4)
    assert (report.progress, report.events, report.draining) == ((), (), False)


def test_a_report_carries_the_load_as_it_is() -> None:
    bench = Bench()
    for name, num_tokens in (("a", 9), ("b", 22)):
        prompt = tuple(range(num_tokens))
        bench.engine.submit(Request(name, "g", "model", prompt, (), SamplingParams(max_tokens=2, seed=0)))
    bench.book.collect(bench.engine)
    report = bench.book.take()
    assert (report.num_waiting, report.num_uncomputed_prompt_tokens) == (2, 31)
    bench.engine.step()
    bench.book.collect(bench.engine)
    report = bench.book.take()
    assert (report.num_running, report.num_uncomputed_prompt_tokens, report.num_free_blocks) == (2, 0, 1)


def test_what_is_not_acknowledged_is_told_again() -> None:
    bench = Bench()
    bench.run("a", 0)
    first = bench.book.take()
    bench.run("b", 100)
    second = bench.book.take()
    assert second.events[: len(first.events)] == first.events
    assert {entry.request_id for entry in second.progress} == {"a", "b"}
    bench.book.acknowledged(first)
    third = bench.book.take()
    assert third.events == second.events[len(first.events) :]
    assert {entry.request_id for entry in third.progress} == {"b"}
    bench.book.acknowledged(third)
    assert not bench.book.has_news


def test_what_changed_after_a_report_is_not_acknowledged_with_it() -> None:
    bench = Bench()
    bench.engine.submit(Request("a", "g", "model", (1, 2), (), SamplingParams(max_tokens=2, seed=0)))
    bench.book.collect(bench.engine)
    report = bench.book.take()
    bench.engine.step()
    bench.book.collect(bench.engine)
    bench.book.acknowledged(report)
    assert bench.book.take().progress == (RequestProgress("a", prefilled=True, finished=False),)


def test_numbers_of_event_messages_have_no_gaps_and_tell_what_is_held() -> None:
    bench = Bench()
    for index in range(6):  # more than the pool can keep
        bench.run(str(index), 100 * index, num_tokens=9)
    messages = bench.book.take().events
    assert [message.sequence_number for message in messages] == list(range(len(messages)))
    assert {message.generation for message in messages} == {GENERATION}
    assert replay(messages) == bench.held()


def test_a_cache_that_was_cleared_is_told_in_its_place() -> None:
    bench = Bench()
    bench.run("a", 0, num_tokens=9)
    bench.engine.reset_prefix_cache()
    bench.run("b", 100)
    messages = bench.book.take().events
    assert BlocksCleared() in [event for message in messages for event in message.events]
    assert replay(messages) == bench.held() == {HASHER.hash_blocks(range(100, 104)).item()}


def test_a_snapshot_takes_the_place_of_what_was_to_be_told() -> None:
    bench = Bench()
    bench.run("a", 0, num_tokens=9)
    number = bench.book.take().events[-1].sequence_number
    bench.book.add_snapshot(bench.engine)
    (message,) = bench.book.take().events
    assert message.is_snapshot
    assert message.sequence_number == number
    assert replay((message,), known={1, 2, 3}) == bench.held()
    bench.run("b", 100)
    assert [message.sequence_number for message in bench.book.take().events] == [number, number + 1]


def test_a_snapshot_of_a_group_that_never_told_anything_counts_as_its_first_message() -> None:
    bench = Bench()
    bench.book.add_snapshot(bench.engine)
    bench.run("a", 0)
    assert [message.sequence_number for message in bench.book.take().events] == [0, 1]
    bench = Bench()
    bench.book.add_snapshot(bench.engine)
    bench.book.add_snapshot(bench.engine)
    assert [message.sequence_number for message in bench.book.take().events] == [0]


def test_a_snapshot_names_the_requests_under_way() -> None:
    bench = Bench()
    bench.run("warm", 0)
    bench.engine.submit(Request("a", "g", "model", tuple(range(5)), (), SamplingParams(max_tokens=9, seed=0)))
    bench.engine.step()
    bench.book.collect(bench.engine)
    bench.book.acknowledged(bench.book.take())
    bench.book.add_snapshot(bench.engine)
    assert bench.book.take().progress == (RequestProgress("a", True, False, num_cached_tokens=4),)


def test_a_router_that_does_not_answer_costs_a_bounded_number_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """And knows everything when it comes back, also when nothing happens any more."""
    monkeypatch.setattr(report_book, "_MOST_EVENT_MESSAGES", 3)
    bench = Bench()
    for index in range(9):
        bench.run(str(index), 100 * index)
        assert len(bench.book.take().events) <= 3
    messages = bench.book.take().events
    numbers = [message.sequence_number for message in messages]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert messages[0].is_snapshot
    assert replay(messages) == bench.held()


def test_a_router_that_does_not_answer_costs_a_bounded_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_book, "_MOST_PROGRESS", 3)
    bench = Bench()
    for index in range(9):
        bench.run(str(index), 100 * index)
    assert [entry.request_id for entry in bench.book.take().progress] == ["6", "7", "8"]


def test_metrics_are_rendered_when_due_and_told_until_acknowledged() -> None:
    bench = Bench()
    bench.book.collect(bench.engine)
    bench.book.collect(bench.engine)
    report: GroupReport = bench.book.take()
    assert (report.metrics, bench.num_rendered) == ("metrics 1", 1)
    assert bench.book.take().metrics == "metrics 1"
    bench.book.acknowledged(report)
    assert bench.book.take().metrics == ""
    bench.book.metrics_due = True
    bench.book.collect(bench.engine)
    assert bench.book.take().metrics == "metrics 2"
    bench.book.acknowledged(report)  # of the earlier ones: these are still to be told
    assert bench.book.take().metrics == "metrics 2"


def test_draining_is_told() -> None:
    book = Bench().book
    book.draining = True
    assert book.take().draining
