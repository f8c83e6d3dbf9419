"""Branches of a request: one prompt, drawn from several times, each branch with an end of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_bench import EngineBench, request

from octavo.worker.messages import Branch, FinishReason, Request, RequestProgress

LENGTH, ABORT = FinishReason.LENGTH, FinishReason.ABORT


def branched(*outputs: tuple[int, ...], max_tokens: int = 3) -> Request:
    """A branch for each of ``outputs``, which it has already."""
    branches = tuple(Branch(index, output) for index, output in enumerate(outputs))
    return replace(request(max_tokens=max_tokens), branches=branches)


def test_the_prompt_of_all_branches_is_computed_once() -> None:
    bench = EngineBench()
    bench.submit(branched((), (), ()))
    bench.run()
    assert [bench.tokens("r", branch) for branch in range(3)] == [[0, 1, 2]] * 3
    assert [bench.reasons("r", branch) for branch in range(3)] == [[LENGTH]] * 3
    assert bench.engine.counters.num_computed_tokens == 6 + 2 * 3
    assert bench.scheduler.counters.num_forks == 2


def test_rows_of_branches_are_told_apart() -> None:
    """The noise of a token depends on its branch."""
    bench = EngineBench()
    bench.submit(branched((), ()))
    bench.step()
    assert [(row.branch, row.position) for row in bench.model.rows] == [(0, 0), (1, 0)]


def test_branches_with_output_start_each_for_itself_and_the_others_together() -> None:
    bench = EngineBench()
    bench.submit(branched((0, 1), (), (0,), ()))
    bench.step()
    assert bench.scheduler.counters.num_forks == 1
    assert sorted((row.branch, row.position) for row in bench.model.rows) == [(0, 2), (1, 0), (2, 1), (3, 0)]
    bench.run()
    assert [bench.tokens("r", branch) for branch in range(4)] == [[2], [0, 1, 2], [1, 2], [0, 1, 2]]


def test_a_branch_may_end_while_the_others_go_on() -> None:
    bench = EngineBench()
    bench.submit(branched((), (), max_tokens=5))
    bench.step(2)
    bench.engine.abort("r", branch=1)
    bench.engine.check()
    assert bench.of("r", 1)[-1].position == 2
    bench.run()
    assert (bench.reasons("r", 0), bench.reasons("r", 1)) == ([LENGTH], [ABORT])
    assert (bench.tokens("r", 0), bench.tokens("r", 1)) == ([0, 1, 2, 3, 4], [0, 1])
    assert bench.engine.counters.finished[ABORT] == 1


@pytest.mark.parametrize("aborted", [0, 1, 2])
def test_a_branch_that_is_aborted_before_the_fork_is_never_made(aborted: int) -> None:
    bench = EngineBench(budget=4)
    bench.submit(branched((), (), ()))
    bench.step()  # half of the prompt
    bench.engine.abort("r", branch=aborted)
    bench.engine.check()
    assert [(update.position, update.finish_reason) for update in bench.of("r", aborted)] == [(0, ABORT)]
    bench.run()
    assert bench.scheduler.counters.num_forks == 1
    assert {branch for branch in range(3) if bench.tokens("r", branch) == [0, 1, 2]} == {0, 1, 2} - {aborted}


def test_the_last_branch_that_is_aborted_ends_the_request() -> None:
    bench = EngineBench(budget=4)
    bench.submit(branched((), ()))
    bench.step()
    for branch in (0, 1):
        bench.engine.abort("r", branch=branch)
    bench.engine.abort("r", branch=1)  # harmless
    assert (bench.engine.num_requests, bench.engine.has_work) == (0, False)
    assert bench.scheduler.pool.num_free_blocks == 32
    assert [bench.reasons("r", branch) for branch in (0, 1)] == [[ABORT]] * 2


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_abort_ends_all_branches_that_there_are_and_those_that_would_be(num_steps: int) -> None:
    bench = EngineBench(budget=4, max_num_seqs=2)
    bench.submit(branched((), (), (), max_tokens=9))
    bench.step(num_steps)
    bench.engine.abort("r")
    bench.engine.check()
    assert [bench.reasons("r", branch) for branch in range(3)] == [[ABORT]] * 3
    assert bench.engine.counters.finished[ABORT] == 3
    assert (bench.engine.has_work, bench.scheduler.pool.num_free_blocks) == (False, 32)


def test_a_branch_that_is_not_there_is_not_aborted() -> None:
    bench = EngineBench()
    bench.submit(branched((), ()))
    bench.step()
    bench.engine.abort("r", branch=7)
    bench.run()
    assert [bench.reasons("r", branch) for branch in range(2)] == [[LENGTH]] * 2


def test_a_deadline_ends_the_branches_that_wait_for_a_slot_too() -> None:
    bench = EngineBench(max_num_seqs=1)
    bench.submit(replace(branched((), (), max_tokens=9), timeout_s=1.0))
    bench.step(3)
    bench.now = 1.0
    bench.engine.step()
    assert [bench.reasons("r", branch) for branch in range(2)] == [[FinishReason.TIMEOUT]] * 2
    assert (bench.tokens("r", 0), bench.tokens("r", 1)) == ([0, 1, 2], [0])


def test_a_request_tells_the_router_of_itself_once_and_of_all_its_tokens() -> None:
    bench = EngineBench()
    bench.submit(branched((), (0,), ()))
    bench.step()
    assert bench.engine.drain_progress() == (RequestProgress("r", prefilled=True, finished=False),)
    bench.run()
    assert bench.engine.drain_progress() == (RequestProgress("r", prefilled=True, finished=True, num_output_tokens=9),)


def test_every_branch_says_what_was_cached_of_its_prompt() -> None:
    bench = EngineBench()
    bench.submit(request("first"))
    bench.run()
    bench.submit(branched((), ()))
    bench.run()
    assert {update.num_cached_tokens for branch in (0, 1) for update in bench.of("r", branch)} == {4}
