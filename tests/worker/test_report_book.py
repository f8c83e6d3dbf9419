"""The report book: what the router must know is repeated until it knows it, and never without bound."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import replace

import pytest

from octavo.worker import report_reader, snapshot_parts
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
from octavo.worker.routing_hash import RoutingHasher, pack_hashes, unpack_hashes
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
    """An engine of 8 blocks of 4 tokens, and its book for the routers a and b."""

    def __init__(self, num_blocks: int = 8) -> None:
        scheduler = Scheduler(SchedulerLimits(num_blocks, 4, 4, 64, 32), HASHER)
        self.engine = Engine(scheduler, Model(), clock=lambda: self.now, emit=lambda gateway, update: None)
        self.now = 0.0
        self.num_rendered = 0
        identity = GroupIdentity("model", "group", GENERATION, 4, num_blocks, 4)
        self.book = ReportBook(identity, self._render, ("a", "b"))

    def _render(self, engine: Engine) -> str:
        self.num_rendered += 1
        return f"metrics {self.num_rendered}"

    def run(self, name: str, first_token: int, *, num_tokens: int = 5, max_tokens: int = 1) -> None:
        """A request from its arrival to its end."""
        prompt = tuple(range(first_token, first_token + num_tokens))
        self.engine.submit(Request(name, "g", "model", prompt, b"", SamplingParams(max_tokens=max_tokens, seed=0)))
        while self.engine.step():
            self.book.collect(self.engine, self.now)

    def take(self, router: str = "a") -> GroupReport:
        return self.book.take(router, self.now)

    def acknowledge(self, report: GroupReport, router: str = "a") -> bool:
        return self.book.acknowledged(router, report)

    def add_snapshot(self, router: str = "a") -> None:
        parts = snapshot_parts.snapshot_parts(self.engine.scheduler.cache.snapshot())
        self.book.add_snapshot(self.engine, parts, router, self.now)

    def tell(self, router: str) -> set[int]:
        """Report until the router has everything, as the leader does; what it knows then."""
        known: set[int] = set()
        while self.book.has_news(router):
            report = self.take(router)
            replay(report.events, known)
            if self.acknowledge(report, router):
                self.add_snapshot(router)
        return known

    def held(self) -> set[int]:
        return hashes(self.engine.scheduler.cache.snapshot())


def hashes(events: tuple[BlocksStored, ...]) -> set[int]:
    return {value for event in events for value in unpack_hashes(event.hashes).tolist()}


def replay(messages: tuple[KVEvents, ...], known: set[int] | None = None) -> set[int]:
    """What a router knows after these messages."""
    known = set() if known is None else known
    for message in messages:
        if message.is_snapshot and message.part == 0:
            known.clear()
        for event in message.events:
            if isinstance(event, BlocksStored):
                known |= set(unpack_hashes(event.hashes).tolist())
            elif isinstance(event, BlocksRemoved):
                known -= set(unpack_hashes(event.hashes).tolist())
            else:
                known.clear()
    return known


def test_the_first_report_says_who_we_are() -> None:
    report = Bench().take()
    assert (report.model, report.group, report.generation) == ("model", "group", GENERATION)
    assert (report.num_blocks, report.num_free_blocks, report.max_num_seqs) == (8, 8, 4)
    assert (report.progress, report.events, report.draining) == ((), (), False)


def test_a_report_carries_the_load_as_it_is() -> None:
    bench = Bench()
    for name, num_tokens in (("a", 9), ("b", 22)):
        prompt = tuple(range(num_tokens))
        bench.engine.submit(Request(name, "g", "model", prompt, b"", SamplingParams(max_tokens=2, seed=0)))
    bench.book.collect(bench.engine, bench.now)
    report = bench.take()
    assert (report.num_waiting, report.num_uncomputed_prompt_tokens) == (2, 31)
    bench.engine.step()
    bench.book.collect(bench.engine, bench.now)
    report = bench.take()
    assert (report.num_running, report.num_uncomputed_prompt_tokens, report.num_free_blocks) == (2, 0, 1)


def test_what_is_expected_to_be_cached_is_no_work_ahead() -> None:
    """Nor when the expectation was larger than the prompt; once it is in the batch, what is left is known."""
    bench = Bench()
    for name, expected in (("a", 4), ("b", 100)):
        request = Request(name, "g", "model", tuple(range(9)), b"", SamplingParams(max_tokens=2, seed=0))
        bench.engine.submit(replace(request, expected_cached_tokens=expected))
    bench.book.collect(bench.engine, bench.now)
    assert bench.take().num_uncomputed_prompt_tokens == 5
    bench.engine.step()
    bench.book.collect(bench.engine, bench.now)
    assert bench.take().num_uncomputed_prompt_tokens == 0


def test_what_is_not_acknowledged_is_told_again() -> None:
    bench = Bench()
    bench.run("a", 0)
    first = bench.take()
    bench.run("b", 100)
    second = bench.take()
    assert second.events[: len(first.events)] == first.events
    assert {entry.request_id for entry in second.progress} == {"a", "b"}
    bench.acknowledge(first)
    third = bench.take()
    assert third.events == second.events[len(first.events) :]
    assert {entry.request_id for entry in third.progress} == {"b"}
    bench.acknowledge(third)
    assert not bench.book.has_news("a")


def test_what_changed_after_a_report_is_not_acknowledged_with_it() -> None:
    bench = Bench()
    bench.engine.submit(Request("a", "g", "model", (1, 2), b"", SamplingParams(max_tokens=2, seed=0)))
    bench.book.collect(bench.engine, bench.now)
    report = bench.take()
    bench.engine.step()
    bench.book.collect(bench.engine, bench.now)
    bench.acknowledge(report)
    assert bench.take().progress == (RequestProgress("a", prefilled=True, finished=False),)


def test_numbers_of_event_messages_have_no_gaps_and_tell_what_is_held() -> None:
    bench = Bench()
    for index in range(6):  # more than the pool can keep
        bench.run(str(index), 100 * index, num_tokens=9)
    messages = bench.take().events
    assert [message.sequence_number for message in messages] == list(range(len(messages)))
    assert {message.generation for message in messages} == {GENERATION}
    assert replay(messages) == bench.held()


def test_a_cache_that_was_cleared_is_told_in_its_place() -> None:
    bench = Bench()
    bench.run("a", 0, num_tokens=9)
    bench.engine.reset_prefix_cache()
    bench.run("b", 100)
    messages = bench.take().events
    assert BlocksCleared() in [event for message in messages for event in message.events]
    assert replay(messages) == bench.held() == {HASHER.hash_blocks(range(100, 104)).item()}


def test_a_snapshot_takes_the_place_of_what_was_to_be_told() -> None:
    bench = Bench()
    bench.run("a", 0, num_tokens=9)
    number = bench.take().events[-1].sequence_number
    bench.add_snapshot()
    (message,) = bench.take().events
    assert message.is_snapshot
    assert message.sequence_number == number
    assert replay((message,), known={1, 2, 3}) == bench.held()
    bench.run("b", 100)
    assert [message.sequence_number for message in bench.take().events] == [number, number + 1]


def test_a_snapshot_of_a_group_that_never_told_anything_counts_as_its_first_message() -> None:
    bench = Bench()
    bench.add_snapshot()
    bench.run("a", 0)
    assert [message.sequence_number for message in bench.take().events] == [0, 1]
    bench = Bench()
    bench.add_snapshot()
    bench.add_snapshot()
    assert [message.sequence_number for message in bench.take().events] == [0]


def test_a_snapshot_names_the_requests_under_way() -> None:
    bench = Bench()
    bench.run("warm", 0)
    bench.engine.submit(Request("a", "g", "model", tuple(range(5)), b"", SamplingParams(max_tokens=9, seed=0)))
    bench.engine.step()
    bench.book.collect(bench.engine, bench.now)
    bench.acknowledge(bench.take())
    bench.add_snapshot()
    assert bench.take().progress == (RequestProgress("a", True, False, num_cached_tokens=4),)


def test_a_router_that_does_not_answer_costs_a_bounded_number_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """And knows everything when it comes back, also when nothing happens any more; the other one misses nothing."""
    monkeypatch.setattr(report_reader, "_MOST_EVENT_MESSAGES", 3)
    bench = Bench()
    told: list[KVEvents] = []
    for index in range(9):
        bench.run(str(index), 100 * index)
        assert len(bench.take("a").events) <= 3
        report = bench.take("b")
        told += report.events
        assert not bench.acknowledge(report, "b")
    assert bench.tell("a") == replay(tuple(told)) == bench.held()
    assert not any(message.is_snapshot for message in told)


def test_a_router_that_does_not_answer_costs_a_bounded_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_reader, "_MOST_PROGRESS", 3)
    bench = Bench()
    for index in range(9):
        bench.run(str(index), 100 * index)
    assert [entry.request_id for entry in bench.take().progress] == ["6", "7", "8"]


def test_metrics_are_rendered_when_due_and_told_until_acknowledged() -> None:
    bench = Bench()
    bench.book.collect(bench.engine, bench.now)
    bench.book.collect(bench.engine, bench.now)
    report: GroupReport = bench.take()
    assert (report.metrics, bench.num_rendered) == ("metrics 1", 1)
    assert bench.take().metrics == "metrics 1"
    bench.acknowledge(report)
    assert bench.take().metrics == ""
    bench.book.metrics_due = True
    bench.book.collect(bench.engine, bench.now)
    assert bench.take().metrics == "metrics 2"
    bench.acknowledge(report)  # of the earlier ones: these are still to be told
    assert bench.take().metrics == "metrics 2"


def test_draining_is_told() -> None:
    book = Bench().book
    book.draining = True
    assert book.take("a", 0.0).draining


def test_routers_are_told_the_same_messages_each_at_its_own_pace() -> None:
    bench = Bench()
    bench.run("r", 0)
    first = bench.take("a")
    assert bench.take("b") == first
    bench.acknowledge(first, "a")
    bench.run("s", 100)
    assert [message.sequence_number for message in bench.take("a").events] == [len(first.events)]
    assert [entry.request_id for entry in bench.take("a").progress] == ["s"]
    assert bench.take("b").events[:-1] == first.events
    assert [entry.request_id for entry in bench.take("b").progress] == ["r", "s"]
    assert bench.tell("b") == bench.held()


def test_a_snapshot_is_for_who_asks_for_it() -> None:
    bench = Bench()
    bench.run("r", 0)
    bench.add_snapshot("a")
    assert [message.is_snapshot for message in bench.take("a").events] == [True]
    assert not any(message.is_snapshot for message in bench.take("b").events)


def test_a_large_snapshot_comes_in_parts_and_what_happens_meanwhile_comes_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report_reader, "MOST_BLOCKS", 12)
    monkeypatch.setattr(snapshot_parts, "MOST_BLOCKS", 12)
    bench = Bench(num_blocks=64)
    for index in range(5):
        bench.run(str(index), 100 * index, num_tokens=31)  # chains of 7 blocks, longer than half a part
    bench.tell("a")
    bench.add_snapshot("a")
    first = bench.take("a")
    assert [(message.part, message.is_snapshot) for message in first.events] == [(0, True)]
    assert bench.take("a").events == first.events
    known = replay(first.events)
    bench.acknowledge(first)
    bench.run("meanwhile", 900, num_tokens=31)
    told: list[KVEvents] = []
    while (report := bench.take("a")).events:
        told += report.events
        bench.acknowledge(report)
    parts = [message for message in told if message.is_snapshot]
    assert [message.part for message in parts] == list(range(1, parts[0].num_parts))
    assert told[: len(parts)] == parts
    assert replay(tuple(told), known) == bench.held()


def test_parts_hold_what_the_snapshot_held_in_its_order() -> None:
    rng = random.Random(3)
    chains = []
    for _ in range(300):
        values = [rng.getrandbits(64) for _ in range(rng.choice((1, 3, 200, 30_000)))]
        chains.append(BlocksStored(rng.choice((None, 7)), pack_hashes(values)))
    parts = snapshot_parts.snapshot_parts(chains)
    assert all(sum(len(event.hashes) for event in part) <= 8 * report_reader.MOST_BLOCKS for part in parts)
    told = [event for part in parts for event in part]
    assert [link for event in told for link in links(event)] == [link for event in chains for link in links(event)]


def links(event: BlocksStored) -> list[tuple[int | None, int]]:
    """(parent, block) of each block."""
    values = unpack_hashes(event.hashes).tolist()
    return list(zip([event.parent_hash, *values[:-1]], values, strict=True))


def test_a_report_says_how_long_its_news_has_waited_and_how_long_the_first_token_took() -> None:
    bench = Bench()
    prompt = tuple(range(5))
    bench.engine.submit(Request("r", "g", "model", prompt, b"", SamplingParams(max_tokens=9, seed=0), tenant="someone"))
    bench.book.collect(bench.engine, bench.now)
    bench.now = 2.0
    bench.engine.step()
    bench.book.collect(bench.engine, bench.now)
    bench.now = 5.0
    report = bench.take()
    assert report.oldest_news_age_s == 3.0
    (progress,) = report.progress
    assert (progress.ttft_s, progress.tenant) == (2.0, "someone")
    bench.acknowledge(report)
    assert bench.take().oldest_news_age_s == 0.0


def test_blocks_that_a_running_request_fills_are_no_urgent_news() -> None:
    bench = Bench()
    prompt = tuple(range(5))
    bench.engine.submit(Request("a", "g", "model", prompt, b"", SamplingParams(max_tokens=9, seed=0)))
    urgent: list[bool] = []
    while bench.engine.step():
        bench.book.collect(bench.engine, bench.now)
        if bench.book.has_news("a"):
            urgent.append(bench.book.has_urgent_news("a"))
            bench.acknowledge(bench.take())
    assert urgent[0]
    assert False in urgent
    assert urgent[-1]
    bench.add_snapshot()
    assert bench.book.has_urgent_news("a")
