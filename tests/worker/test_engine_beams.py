"""Beam searches in the engine: beams fork and are dropped, take memory together, and end as one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_bench import EngineBench, request
from fake_rank import FakeRank

from octavo.worker.engine import Engine
from octavo.worker.messages import Branch, FinishReason, Request, RequestProgress, SequenceUpdate
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.sampling_row import Candidate, SamplingRow
from octavo.worker.scheduler import Scheduler, SchedulerLimits

LENGTH, STOP, TIMEOUT, ERROR = FinishReason.LENGTH, FinishReason.STOP, FinishReason.TIMEOUT, FinishReason.ERROR


def search(
    request_id: str = "r", *, width: int = 2, best: int = 1, prompt: range = range(10, 16), **sampling: object
) -> Request:
    """A beam search of which the ``best`` outputs are wanted."""
    searched = request(request_id, prompt=prompt, **({"beam_width": width} | sampling))  # type: ignore[arg-type]
    return replace(searched, branches=tuple(Branch(index) for index in range(best)))


# ---- what it finds ----


def test_the_likeliest_outputs_come_at_the_end_the_best_one_first() -> None:
    bench = EngineBench()
    bench.submit(search(best=2))
    bench.step(2)
    assert bench.updates == []
    bench.run()
    assert bench.of("r", 0) == [SequenceUpdate("r", 0, 0, (0, 0, 0), LENGTH, 0)]
    # 001 and 010 are equally likely: of equals the continuation of the better beam comes first.
    assert bench.of("r", 1) == [SequenceUpdate("r", 1, 0, (0, 0, 1), LENGTH, 0)]


def test_rows_ask_for_the_candidates_that_the_search_needs() -> None:
    bench = EngineBench()
    bench.submit(search(width=3, stop_token_ids=(8, 9), min_tokens=1))
    bench.run()
    assert {row.num_candidates for row in bench.model.rows} == {5}
    assert [len(plan.logit_indices) for plan in bench.model.plans] == [1, 3, 3]
    assert [row.banned_token_ids for row in bench.model.rows[:2]] == [(8, 9), ()]


def test_an_output_may_end_with_a_stop_token() -> None:
    def likely(row: SamplingRow) -> tuple[Candidate, ...]:
        return ((7, -0.1), (1, -5.0), (2, -6.0))

    bench = EngineBench()
    bench.model.likely = likely
    bench.submit(search(best=2, max_tokens=4, stop_token_ids=(7,)))
    bench.run()
    assert [(bench.tokens("r", branch), bench.reasons("r", branch)) for branch in (0, 1)] == [
        ([7], [STOP]),
        ([1, 7], [STOP]),
    ]


# ---- forks and drops ----


def test_beams_fork_where_several_go_on_and_are_dropped_where_none_does() -> None:
    bench = EngineBench()
    bench.submit(search(max_tokens=5))
    bench.step()  # the prompt is forked
    assert (bench.scheduler.num_running, bench.scheduler.counters.num_forks) == (2, 1)
    bench.step()  # the likelier beam is forked, the other one dropped
    assert (bench.scheduler.num_running, bench.scheduler.counters.num_forks) == (2, 2)
    beams = sorted(sequence.token_ids[-2:].tolist() for sequence in bench.scheduler.running)
    assert beams == [[0, 0], [0, 1]]
    assert len({sequence.branch for sequence in bench.scheduler.running}) == 2


def test_beams_share_all_they_have_in_common() -> None:
    bench = EngineBench()
    bench.submit(search(width=4, prompt=range(17), max_tokens=5))
    bench.step(3)
    tables = [sequence.block_table for sequence in bench.scheduler.running]
    assert {tuple(table[:4]) for table in tables} == {tuple(tables[0][:4])}
    assert bench.scheduler.pool.num_held_blocks == len({block for table in tables for block in table}) <= 4 + 4


def test_nothing_is_left_of_a_search_that_has_ended() -> None:
    bench = EngineBench()
    bench.submit(search(width=4, best=2, max_tokens=6))
    bench.run()
    assert (bench.engine.num_requests, bench.engine.has_work) == (0, False)
    assert bench.scheduler.pool.num_free_blocks == 32
    assert {reason: n for reason, n in bench.engine.counters.finished.items() if n} == {LENGTH: 2}


def test_the_router_hears_of_a_search_as_of_its_beams() -> None:
    """What it learns from is how many tokens were computed: all beams, for as long as the longest output."""
    bench = EngineBench()
    bench.submit(search(width=2, max_tokens=3))
    bench.step()
    assert bench.engine.drain_progress() == (RequestProgress("r", prefilled=True, finished=False),)
    bench.run()
    assert bench.engine.drain_progress() == (RequestProgress("r", prefilled=True, finished=True, num_output_tokens=6),)


# ---- other ends ----


def test_at_its_deadline_a_search_gives_the_best_that_there_is() -> None:
    bench = EngineBench()
    bench.submit(replace(search(best=2, max_tokens=9), timeout_s=1.0))
    bench.step(2)
    bench.now = 1.0
    bench.engine.step()
    bench.engine.check()
    assert bench.of("r", 0) == [SequenceUpdate("r", 0, 0, (0, 0), TIMEOUT, 0)]
    assert bench.of("r", 1) == [SequenceUpdate("r", 1, 0, (0, 1), TIMEOUT, 0)]
    assert not bench.engine.has_work


def test_an_abort_ends_a_search_as_a_whole_with_nothing() -> None:
    bench = EngineBench()
    bench.submit(search(best=2, max_tokens=9))
    bench.step(2)
    bench.engine.abort("r", branch=0)
    assert bench.updates == []  # there are no branches before the end
    bench.engine.abort("r")
    bench.engine.check()
    assert [bench.of("r", b)[0].token_ids for b in (0, 1)] == [(), ()]
    assert [bench.reasons("r", b) for b in (0, 1)] == [[FinishReason.ABORT]] * 2
    assert bench.scheduler.pool.num_free_blocks == 32


def test_a_search_of_which_one_beam_cannot_be_computed_ends_with_an_error() -> None:
    bench = EngineBench()
    bench.submit(search(best=2, max_tokens=9))
    bench.step(2)
    bench.model.unsampled_seed = 5
    bench.submit(request("other", seed=6))
    bench.run()
    assert [bench.reasons("r", b) for b in (0, 1)] == [[ERROR]] * 2
    assert bench.reasons("other") == [LENGTH]


def test_a_search_that_nothing_can_follow_ends() -> None:
    bench = EngineBench()
    bench.model.likely = lambda row: ()
    bench.submit(search(best=2))
    bench.run()
    assert [(bench.tokens("r", b), bench.reasons("r", b)) for b in (0, 1)] == [([], [LENGTH])] * 2


def test_a_search_starts_from_the_prompt_whatever_it_had_found_elsewhere() -> None:
    bench = EngineBench()
    bench.submit(replace(search(), branches=(Branch(0, ()), Branch(1, ()))))
    bench.run()
    assert bench.tokens("r", 0) == [0, 0, 0]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (search(width=2, best=3), "n is 3, but beam_width is 2"),
        (search(width=9), "beam_width is 9, but --max-num-seqs is 8"),
        (
            search(width=8, prompt=range(8), max_tokens=20),
            "28 tokens for each of 8 beams need 42 KV blocks of 4 tokens, but the pool has 32",
        ),
    ],
)
def test_a_search_that_can_never_run_is_refused_with_the_numbers(asked: Request, message: str) -> None:
    bench = EngineBench()
    bench.submit(asked)
    assert bench.of()[0].error == message
    assert {reason for b in asked.branches for reason in bench.reasons("r", b.index)} == {ERROR}
    assert not bench.engine.has_work


# ---- memory runs out ----


class Searches:
    """Searches over a rank that keeps tokens: what a beam reads through its table must be its own."""

    def __init__(self, *, num_blocks: int, max_num_seqs: int = 8) -> None:
        limits = SchedulerLimits(num_blocks, 4, max_num_seqs, 64, 64)
        rank = FakeRank(limits)
        self.scheduler = rank.scheduler = Scheduler(limits, RoutingHasher(bytes(16), 4))
        self.engine = Engine(self.scheduler, rank, clock=lambda: 0.0, emit=self._emit)
        self.outputs: dict[str, tuple[int, ...]] = {}

    def _emit(self, gateway_id: str, update: SequenceUpdate) -> None:
        assert update.request_id not in self.outputs
        assert update.finish_reason is LENGTH
        self.outputs[update.request_id] = update.token_ids

    def run(self, *requests: Request) -> dict[str, tuple[int, ...]]:
        for each in requests:
            self.engine.submit(each)
        while self.engine.step():
            self.engine.check()
        return self.outputs


def long_search(name: str, first_token: int, **fields: object) -> Request:
    asked = search(name, width=3, prompt=range(first_token, first_token + 9), max_tokens=12)
    return replace(asked, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("use_prefix_cache", [True, False])
def test_searches_that_do_not_fit_beside_each_other_still_find_the_same(use_prefix_cache: bool) -> None:
    asked = [long_search(str(i), 10 * i, use_prefix_cache=use_prefix_cache) for i in range(3)]
    together = Searches(num_blocks=14)
    outputs = together.run(*asked)
    assert together.scheduler.counters.num_preemptions > 0
    assert together.scheduler.counters.num_copied_blocks > 0
    assert outputs == {name: out for each in asked for name, out in Searches(num_blocks=64).run(each).items()}
    assert together.scheduler.pool.num_free_blocks == 14


def test_beams_without_a_slot_wait_for_one_of_another_search() -> None:
    asked = long_search("r", 0), long_search("s", 30)
    assert Searches(num_blocks=64, max_num_seqs=4).run(*asked) == Searches(num_blocks=64).run(*asked)
