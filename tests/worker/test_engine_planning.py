"""Planning ahead: the next step is launched before the one under way is over, and nobody can tell by the tokens."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest
from engine_bench import EngineBench, request
from fake_rank import FakeRank
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.engine import Engine
from octavo.worker.messages import Branch, FinishReason, Request, SamplingParams, SequenceUpdate
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.sampling_row import StepResult
from octavo.worker.scheduler import Scheduler, SchedulerLimits

LENGTH, STOP, ABORT = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT


def ahead(**limits: int) -> EngineBench:
    return EngineBench(plans_ahead=True, **limits)


# ---- what is launched when ----


def test_a_step_is_launched_before_the_one_under_way_is_taken_in() -> None:
    bench = ahead()
    bench.submit(request())
    bench.step()
    assert (len(bench.model.plans), bench.tokens()) == (1, [])
    bench.step()
    assert (len(bench.model.plans), bench.tokens()) == (2, [0])
    assert bench.model.plans[1].token_ids.tolist() == [-1]


def test_the_prompt_tokens_of_the_step_under_way_are_work_ahead_until_they_are_done() -> None:
    """The last token of a prompt gives the first of the output, and counts as a decode."""
    bench = ahead()
    assert bench.engine.num_prefill_tokens_under_way == 0
    bench.submit(request(prompt=range(7)))
    bench.step()
    assert bench.engine.num_prefill_tokens_under_way == 6
    bench.step()  # a decode
    assert bench.engine.num_prefill_tokens_under_way == 0


def test_no_step_is_launched_for_a_token_too_many() -> None:
    bench = ahead()
    bench.submit(request(max_tokens=3))
    bench.run()
    assert len(bench.model.plans) == 3
    assert bench.tokens() == [0, 1, 2]
    assert not bench.engine.step()


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_the_last_step_under_way_is_work_until_it_is_taken_in(max_tokens: int) -> None:
    bench = ahead()
    bench.submit(request(max_tokens=max_tokens))
    for _ in range(max_tokens):
        bench.step()
    assert (bench.engine.has_work, bench.engine.in_flight is None) == (True, False)
    bench.step()
    assert (bench.engine.has_work, bench.engine.in_flight is None) == (False, True)
    assert bench.reasons() == [LENGTH]


def test_what_stopped_in_a_step_is_ignored_in_the_next_one() -> None:
    bench = ahead()
    bench.submit(request(max_tokens=9, stop_token_ids=(1,)))
    bench.submit(request("other", max_tokens=9))
    bench.run()
    assert (bench.tokens(), bench.reasons()) == ([0, 1], [STOP])
    assert bench.tokens("other") == list(range(9))
    assert [len(plan.slots) for plan in bench.model.plans[:4]] == [2, 2, 2, 1]
    assert bench.engine.counters.num_generation_tokens == 2 + 9


def test_branches_are_forked_in_a_step_that_is_not_over() -> None:
    bench = ahead()
    bench.submit(replace(request(), branches=(Branch(0), Branch(1))))
    bench.step(2)
    assert bench.model.plans[1].token_ids.tolist() == [-1, -2]
    bench.run()
    assert [bench.tokens("r", branch) for branch in (0, 1)] == [[0, 1, 2]] * 2


def test_a_branch_that_ends_while_its_fork_is_under_way_takes_nothing_from_the_others() -> None:
    bench = ahead()
    bench.submit(replace(request(max_tokens=4), branches=(Branch(0), Branch(1))))
    bench.step()
    bench.engine.abort("r", branch=0)
    bench.engine.check()
    bench.run()
    assert (bench.tokens("r", 0), bench.reasons("r", 0)) == ([], [ABORT])
    assert (bench.tokens("r", 1), bench.reasons("r", 1)) == ([0, 1, 2, 3], [LENGTH])


# ---- a search under way ----


def test_nothing_is_planned_ahead_while_a_search_is_under_way() -> None:
    bench = ahead()
    bench.submit(request("stream", max_tokens=12))
    bench.step(2)
    bench.submit(request("search", max_tokens=3, beam_width=2))
    bench.step()
    assert bench.engine.in_flight is None
    bench.step(2)
    assert bench.reasons("search") == [LENGTH]
    bench.step()
    assert bench.engine.in_flight is not None
    bench.run()
    assert bench.tokens("stream") == list(range(12))


# ---- blocks of a step under way ----


def test_blocks_of_what_was_aborted_are_free_when_its_step_is_over() -> None:
    bench = ahead(num_blocks=4)
    bench.submit(request(prompt=range(14), max_tokens=2))
    bench.step()
    bench.engine.abort("r")
    assert bench.reasons() == [ABORT]
    bench.submit(request("next", prompt=range(20, 34), max_tokens=2))
    assert bench.scheduler.pool.num_free_blocks == 0
    bench.step()  # takes the old step in; the new prompt has to wait for its blocks
    assert len(bench.model.plans) == 1
    assert bench.scheduler.pool.num_free_blocks == 4
    bench.run()
    assert bench.tokens("next") == [0, 1]


def test_nobody_is_preempted_for_blocks_that_are_about_to_come_back() -> None:
    """Of two that fill the pool one is gone; the other one needs a block before the step under way is over."""
    bench = ahead(num_blocks=5)
    bench.submit(request("goes", prompt=range(20, 28), max_tokens=8))
    bench.submit(request("stays", prompt=range(4), max_tokens=8))
    bench.step()
    assert bench.scheduler.num_running == 2
    bench.engine.abort("goes")
    bench.run()
    assert bench.tokens("stays") == list(range(8))
    assert bench.scheduler.counters.num_preemptions == 0


# ---- time and failure ----


def test_a_deadline_while_a_step_is_under_way_ends_with_what_was_taken_in() -> None:
    bench = ahead()
    bench.submit(replace(request(max_tokens=9), timeout_s=1.0))
    bench.step(2)
    bench.now = 1.0
    bench.run()
    assert bench.of()[-1] == SequenceUpdate("r", 0, 1, (), FinishReason.TIMEOUT, 0)
    assert bench.tokens() == [0]


def test_a_step_that_fails_is_not_hidden() -> None:
    bench = ahead()
    bench.submit(request())
    bench.step()
    bench.model.failure = RuntimeError("a rank is gone")
    bench.step()
    with pytest.raises(RuntimeError, match="a rank is gone"):
        bench.engine.step()


def test_the_next_step_is_planned_shortly_before_the_one_under_way_is_expected_to_end() -> None:
    bench = ahead()
    assert bench.engine.plan_at_s == 0.0
    bench.engine.speed.note(0, 1, 0.5)
    bench.submit(request(prompt=range(1), max_tokens=9))
    bench.now = 10.0
    bench.step()
    assert bench.engine.plan_at_s == pytest.approx(10.5 - 0.002)


def test_a_step_is_timed_from_when_the_one_before_it_was_over() -> None:
    bench = ahead()
    bench.submit(request(max_tokens=4))
    for now in (0.0, 1.0, 1.5, 2.0):
        bench.now = now
        bench.step()
    assert bench.engine.speed.decode_step_s == pytest.approx(0.5)


def test_a_search_that_waits_for_a_slot_does_not_keep_others_from_being_planned_ahead() -> None:
    bench = EngineBench(max_num_seqs=2, plans_ahead=True)
    for name in ("one", "two"):
        bench.submit(request(name, max_tokens=9))
    bench.step()
    bench.submit(request("search", beam_width=2))
    bench.step()
    assert bench.engine.in_flight is not None


def test_the_block_that_the_last_token_but_one_fills_is_found_afterwards() -> None:
    """Its tokens were not known when the step that fills it was planned, and no step follows."""
    bench = ahead()
    bench.submit(request(prompt=range(10, 16), max_tokens=3))  # 8 computed tokens, blocks of 4
    bench.run()
    assert bench.scheduler.cache.num_blocks == 2


# ---- the same tokens ----


class Group:
    """An engine over a rank that keeps tokens; a step is carried out at once, or as late as can be."""

    def __init__(self, limits: SchedulerLimits, *, eager: bool) -> None:
        rank = FakeRank(limits, eager=eager)
        self.scheduler = rank.scheduler = Scheduler(limits, RoutingHasher(bytes(16), limits.block_size))
        self.engine = Engine(self.scheduler, rank, clock=lambda: 0.0, emit=self._emit)
        self.outputs: dict[tuple[str, int], tuple[tuple[int, ...], FinishReason | None]] = {}

    def _emit(self, gateway_id: str, update: SequenceUpdate) -> None:
        branch = update.request_id, update.branch
        tokens, ended = self.outputs.get(branch, ((), None))
        assert ended is None
        self.outputs[branch] = tokens + update.token_ids, update.finish_reason

    def run(self, requests: list[Request]) -> dict[tuple[str, int], tuple[tuple[int, ...], FinishReason | None]]:
        for each in requests:
            self.engine.submit(each)
            self.engine.step()
            self.engine.check()
        while self.engine.step():
            self.engine.check()
        return self.outputs


@given(
    st.lists(
        st.tuples(st.integers(1, 14), st.integers(0, 1), st.integers(1, 8), st.integers(1, 3), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    st.integers(7, 12),
    st.integers(1, 6),
    st.booleans(),
)
def test_planned_ahead_or_not_the_tokens_are_the_same(
    shapes: list[tuple[int, int, int, int, bool]], num_blocks: int, max_num_seqs: int, eager: bool
) -> None:
    requests = [
        Request(
            str(number),
            "gateway",
            "model",
            tuple(range(family, family + length)),
            b"",
            SamplingParams(max_tokens=max_tokens, seed=number, stop_token_ids=(3,) if stops else ()),
            branches=tuple(Branch(index) for index in range(num_branches)),
        )
        for number, (length, family, max_tokens, num_branches, stops) in enumerate(shapes)
    ]
    limits = SchedulerLimits(num_blocks, 4, max_num_seqs, 8, 28)
    expected = Group(limits, eager=True).run(requests)
    group = Group(replace(limits, plans_ahead=True), eager=eager)
    assert group.run(requests) == expected
    assert group.scheduler.pool.num_free_blocks == num_blocks


def test_a_step_that_is_slow_is_waited_for() -> None:
    """The future is asked for its result only when the next step was launched."""
    order: list[str] = []

    class Waited(Future[StepResult]):
        def result(self, timeout: float | None = None) -> StepResult:
            order.append("waited for")
            return super().result(timeout)

    bench = ahead()
    launch = bench.model.launch

    def launch_and_note(plan: object, rows: object) -> Future[StepResult]:
        order.append("launched")
        future = Waited()
        future.set_result(launch(plan, rows).result())  # type: ignore[arg-type]
        return future

    bench.model.launch = launch_and_note  # type: ignore[method-assign]
    bench.submit(request(max_tokens=2))
    bench.run()
    assert order == ["launched", "launched", "waited for", "waited for"]
