"""The executor: steps run in their order in a thread of its own, and what fails there reaches who launched it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.kernels.backend import reference_kernels
from octavo.worker import executor as executor_module
from octavo.worker.collectives import Collectives, SingleProcess
from octavo.worker.executor import STEPS_BETWEEN_CAPTURES, Executor
from octavo.worker.host_copy import HostCopy
from octavo.worker.messages import FinishReason, SamplingParams
from octavo.worker.sampling_row import SamplingRow
from octavo.worker.sampling_state import RowEnd, SamplingState
from octavo.worker.step_plan import GraphKey, Int32Array, PlanKind, StepPlan, unpack_plan
from octavo.worker.step_thread import EarlierFailure, StepThread

LONG_S = 60.0
LOGITS = torch.tensor([[0.0, 3.0, 2.0, 1.0]])

GREEDY = SamplingRow(seed=0, branch=0, position=0, temperature=0.0, top_p=1.0, top_k=None)
UNSAMPLEABLE = SamplingRow(seed=-1, branch=0, position=0, temperature=1.0, top_p=1.0, top_k=None)
"""A seed is 64 bits, unsigned."""
BEAM = SamplingRow(seed=0, branch=0, position=0, temperature=0.0, top_p=1.0, top_k=None, num_candidates=2)


class Runner:
    """Gives the same logits for each row; notes the steps. A test can hold it up, or let a step fail."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.threads: set[int] = set()
        self.remembered: dict[int, list[int]] = {}
        self.may_run = threading.Event()
        self.may_run.set()
        self.failing: dict[int, Exception] = {}
        self.idle_graphs: list[GraphKey] = []
        self.missed_graphs: list[GraphKey] = []
        self.captured: list[GraphKey] = []

    def execute(self, plan: StepPlan) -> Tensor:
        assert self.may_run.wait(LONG_S)
        self.threads.add(threading.get_ident())
        self.steps.append(plan.step)
        if plan.step in self.failing:
            raise self.failing[plan.step]
        return LOGITS.repeat(plan.logit_indices.size, 1)

    def remember(self, step: int, token_ids: Tensor) -> None:
        self.remembered[step] = token_ids.tolist()

    def next_graph(self, *, idle: bool) -> GraphKey | None:
        wanted = self.idle_graphs if idle else self.missed_graphs
        return wanted.pop(0) if wanted else None

    def capture(self, key: GraphKey, collectives: Collectives) -> None:
        self.captured.append(key)


class Ranks(SingleProcess):
    """Two ranks, of which the other hears everything; a test can let it be gone."""

    size = 2

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.shared: list[list[int]] = []
        self.failure: Exception | None = None

    def broadcast_plan(self, buffer: Int32Array | None) -> Int32Array:
        assert buffer is not None
        if self.failure:
            raise self.failure
        plan = unpack_plan(buffer)
        self.heard.append(f"step {plan.step}" if plan.kind is PlanKind.STEP else plan.kind.name.lower())
        return buffer

    def share_sampled(self, token_ids: Tensor | None, count: int, device: torch.device) -> Tensor:
        assert token_ids is not None
        assert token_ids.shape == (count,)
        self.shared.append(token_ids.tolist())
        return token_ids.to(device)


class Bench:
    def __init__(self, *, overlaps: bool = False) -> None:
        self.runner = Runner()
        self.ranks = Ranks()
        self.executor = Executor(self.runner, self.ranks, reference_kernels(), overlaps=overlaps)


@pytest.fixture(params=[False, True], ids=["", "overlapping"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(overlaps=request.param)
    yield bench
    bench.runner.may_run.set()
    bench.executor.shut_down()


def plan(step: int, num_rows: int = 1, *, share: bool = False) -> StepPlan:
    return StepPlan(PlanKind.STEP, step=step, logit_indices=np.arange(num_rows, dtype=np.int32), share_sampled=share)


def step_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name in ("steps", "results")]


# ---- order ----


def test_launch_returns_before_the_step_has_run(bench: Bench) -> None:
    bench.runner.may_run.clear()
    first, second = bench.executor.launch(plan(1), [GREEDY]), bench.executor.launch(plan(2), [GREEDY])
    assert not first.done()
    bench.runner.may_run.set()
    assert (first.result(LONG_S).token_ids, second.result(LONG_S).token_ids) == ([1], [1])
    assert bench.runner.steps == [1, 2]


def test_everything_happens_in_one_thread_which_is_not_the_callers(bench: Bench) -> None:
    for step in (1, 2):
        bench.executor.launch(plan(step), [GREEDY]).result(LONG_S)
    assert len(bench.runner.threads) == 1
    assert threading.get_ident() not in bench.runner.threads


def test_the_ranks_hear_beats_and_the_end_in_order_with_the_steps(bench: Bench) -> None:
    bench.executor.launch(plan(1), [GREEDY])
    bench.executor.heartbeat()
    bench.executor.launch(plan(2), [GREEDY])
    bench.executor.shut_down()
    assert bench.ranks.heard == ["step 1", "heartbeat", "step 2", "shutdown"]


def test_a_step_that_was_launched_cannot_be_called_off(bench: Bench) -> None:
    bench.runner.may_run.clear()
    first, second = bench.executor.launch(plan(1), [GREEDY]), bench.executor.launch(plan(2), [GREEDY])
    assert not second.cancel()
    bench.runner.may_run.set()
    assert first.result(LONG_S).token_ids == second.result(LONG_S).token_ids == [1]


def test_a_third_step_under_way_is_refused(bench: Bench) -> None:
    bench.runner.may_run.clear()
    under_way = [bench.executor.launch(plan(step), [GREEDY]) for step in (1, 2)]
    with pytest.raises(RuntimeError, match="step 3 was launched while 2 others were under way"):
        bench.executor.launch(plan(3), [GREEDY])
    bench.runner.may_run.set()
    under_way[0].result(LONG_S)
    assert bench.executor.launch(plan(3), [GREEDY]).result(LONG_S).token_ids == [1]


class SlowCopy(HostCopy):
    """What a step gives does not reach the host before the test says so, or breaks on the way."""

    may_land = threading.Event()
    failure: Exception | None = None

    def wait(self) -> Tensor:
        assert self.may_land.wait(LONG_S)
        if self.failure:
            raise self.failure
        return super().wait()


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Copies are slow."""
    monkeypatch.setattr(executor_module, "HostCopy", SlowCopy)
    monkeypatch.setattr(SlowCopy, "may_land", threading.Event())
    bench = Bench(overlaps=True)
    yield bench
    SlowCopy.may_land.set()
    bench.executor.shut_down()


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_on_the_host(overlapping: Bench) -> None:
    first, second = (overlapping.executor.launch(plan(step), [GREEDY]) for step in (1, 2))
    overlapping.executor._thread.submit(lambda: None).result(LONG_S)
    assert overlapping.runner.steps == [1, 2]
    assert not first.done()
    SlowCopy.may_land.set()
    assert second.result(LONG_S).token_ids == [1]
    assert first.done()


def test_steps_whose_tokens_are_not_on_the_host_count_as_under_way(overlapping: Bench) -> None:
    for step in (1, 2):
        overlapping.executor.launch(plan(step), [] if step == 1 else [GREEDY])
    with pytest.raises(RuntimeError, match="2 others were under way"):
        overlapping.executor.launch(plan(3), [GREEDY])


def test_a_heartbeat_waits_for_tokens_that_are_under_way(overlapping: Bench) -> None:
    first = overlapping.executor.launch(plan(1), [GREEDY])
    done_at_beat: list[bool] = []
    overlapping.runner.next_graph = lambda *, idle: done_at_beat.append(first.done())  # type: ignore[method-assign]
    threading.Timer(0.01, SlowCopy.may_land.set).start()
    overlapping.executor.heartbeat()
    assert overlapping.ranks.heard == ["step 1", "heartbeat"]
    assert done_at_beat == [True]


# ---- recording graphs ----


def test_an_idle_group_records_one_graph_a_beat_on_all_ranks(bench: Bench) -> None:
    keys = [GraphKey(8, 2048), GraphKey(4, 2048)]
    bench.runner.idle_graphs = list(keys)
    for _ in range(3):
        bench.executor.heartbeat()
    assert bench.ranks.heard == ["heartbeat", "capture", "heartbeat", "capture", "heartbeat"]
    assert bench.runner.captured == keys


def test_under_load_a_graph_that_was_missed_is_recorded_every_so_many_steps(bench: Bench) -> None:
    bench.runner.missed_graphs = [GraphKey(2, 2048), GraphKey(1, 2048)]
    for step in range(2 * STEPS_BETWEEN_CAPTURES + 1):
        result = bench.executor.launch(plan(step), [GREEDY]).result(LONG_S)
        assert result.was_held_up == (step in (STEPS_BETWEEN_CAPTURES, 2 * STEPS_BETWEEN_CAPTURES))
    places = [index for index, heard in enumerate(bench.ranks.heard) if heard == "capture"]
    assert places == [STEPS_BETWEEN_CAPTURES, 2 * STEPS_BETWEEN_CAPTURES + 1]


# ---- what a step gives ----


def test_a_step_without_rows_gives_nothing_and_shares_nothing(bench: Bench) -> None:
    result = bench.executor.launch(plan(1, 0, share=True), []).result(LONG_S)
    assert (result.token_ids, dict(result.candidates)) == ([], {})
    assert bench.ranks.shared == []


def test_drawn_rows_and_candidates_side_by_side(bench: Bench) -> None:
    result = bench.executor.launch(plan(1, 3), [GREEDY, BEAM, GREEDY]).result(LONG_S)
    assert result.token_ids == [1, 1, 1]
    assert [token for token, _ in result.candidates[1]] == [1, 2]


@pytest.mark.parametrize("share", [False, True])
def test_a_row_that_cannot_be_sampled_leaves_the_others_alone(bench: Bench, share: bool) -> None:
    rows = [GREEDY, UNSAMPLEABLE, BEAM]
    result = bench.executor.launch(plan(1, 3, share=share), rows).result(LONG_S)
    assert result.token_ids == [1, None, 1]
    assert [token for token, _ in result.candidates[2]] == [1, 2]
    assert bench.executor.launch(plan(2), [GREEDY]).result(LONG_S).token_ids == [1]


def test_the_other_ranks_and_the_next_plan_get_tokens_whatever_happens(bench: Bench) -> None:
    """A token that could not be drawn is 0 there."""
    bench.executor.launch(plan(1, 3, share=True), [GREEDY, UNSAMPLEABLE, BEAM]).result(LONG_S)
    assert bench.ranks.shared == [[1, 0, 1]]
    assert bench.runner.remembered == {1: [1, 0, 1]}


def test_nothing_is_shared_that_no_plan_names(bench: Bench) -> None:
    bench.executor.launch(plan(1), [GREEDY]).result(LONG_S)
    assert bench.ranks.shared == []
    assert bench.runner.remembered == {}


def test_a_leader_alone_remembers_its_tokens_too() -> None:
    runner = Runner()
    executor = Executor(runner, SingleProcess(), reference_kernels())
    executor.launch(plan(1, 2, share=True), [GREEDY, UNSAMPLEABLE]).result(LONG_S)
    executor.shut_down()
    assert runner.remembered == {1: [1, 0]}


# ---- rows whose state depends on the token before ----


def penalised(position: int, state: SamplingState) -> SamplingRow:
    return replace(GREEDY, position=position, state=state)


def new_state() -> SamplingState:
    """Greedy, with LOGITS: 1, 2, 3, 0, and again."""
    return SamplingState.start(SamplingParams(max_tokens=9, seed=0, frequency_penalty=4.0), (1, 1, 1))


def test_states_know_the_tokens_of_the_step_before(bench: Bench) -> None:
    state, other = new_state(), new_state()
    steps = [bench.executor.launch(plan(0, 2), [penalised(0, state), GREEDY])]
    for step in range(1, 5):
        rows = [GREEDY, penalised(step, state), penalised(step - 1, other)]
        steps.append(bench.executor.launch(plan(step, 3), rows))
        steps[-2].result(LONG_S)
    assert [step.result(LONG_S).token_ids for step in steps] == [[1, 1], [1, 2, 1], [1, 3, 2], [1, 0, 3], [1, 1, 0]]


def test_rows_with_such_a_state_wait_when_the_forward_pass_is_launched(
    overlapping: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_at_wait: list[list[int]] = []
    waits, tell = threading.Event(), overlapping.executor._tell_states

    def note() -> None:
        steps_at_wait.append(overlapping.runner.steps.copy())
        waits.set()
        tell()

    monkeypatch.setattr(overlapping.executor, "_tell_states", note)
    state = new_state()
    first = overlapping.executor.launch(plan(1), [penalised(0, state)])
    assert waits.wait(LONG_S)
    waits.clear()
    second = overlapping.executor.launch(plan(2), [penalised(1, state)])
    assert waits.wait(LONG_S)
    assert steps_at_wait == [[1], [1, 2]]
    assert not first.done()
    SlowCopy.may_land.set()
    assert (first.result(LONG_S).token_ids, second.result(LONG_S).token_ids) == ([1], [2])


def test_other_rows_do_not_wait(overlapping: Bench) -> None:
    overlapping.executor.launch(plan(1), [penalised(0, new_state())])
    biased = SamplingState.start(SamplingParams(max_tokens=9, seed=0, logit_bias=((0, 9.0),)), (1,))
    second = overlapping.executor.launch(plan(2, 2), [GREEDY, replace(GREEDY, state=biased)])
    overlapping.executor._thread.submit(lambda: None).result(LONG_S)
    SlowCopy.may_land.set()
    assert second.result(LONG_S).token_ids == [1, 0]


def test_a_state_that_loses_its_way_ends_its_own_branch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was asked for a token which is not its next."""
    broken, behind, sound = new_state(), new_state(), new_state()
    monkeypatch.setattr(broken, "accept", lambda position, token: 1 // 0)
    first = bench.executor.launch(plan(1, 2), [penalised(0, broken), penalised(0, sound)])
    rows = [penalised(1, broken), penalised(1, behind), penalised(1, sound)]
    second = bench.executor.launch(plan(2, 3), rows).result(LONG_S)
    assert first.result(LONG_S).token_ids == [1, 1]
    assert second.token_ids == [None, None, 2]
    assert second.ends == {0: RowEnd(FinishReason.ERROR, "the next token could not be sampled")}


def test_a_row_that_could_not_be_sampled_is_the_end_of_its_state(bench: Bench) -> None:
    """What is planned ahead for it is drawn as if nothing were wished."""
    state = new_state()
    first = bench.executor.launch(plan(1), [replace(UNSAMPLEABLE, state=state)])
    second = bench.executor.launch(plan(2), [penalised(1, state)])
    assert (first.result(LONG_S).token_ids, second.result(LONG_S).token_ids) == ([None], [1])


def test_an_idle_executor_holds_on_to_no_state(bench: Bench) -> None:
    state = new_state()
    bench.executor.launch(plan(1), [penalised(0, state)]).result(LONG_S)
    bench.executor.heartbeat()
    assert state.position == 1
    gone = weakref.ref(state)
    del state
    gc.collect()
    assert gone() is None


# ---- log-probabilities ----


def test_log_probabilities_come_with_the_tokens_of_the_rows_that_want_them(bench: Bench) -> None:
    """Those of the model, whatever else is wished; also where rows are sampled one by one."""
    biased = SamplingState.start(SamplingParams(max_tokens=9, seed=0, logit_bias=((0, 9.0),)), (1,))
    rows = [replace(GREEDY, num_logprobs=2), GREEDY, replace(GREEDY, num_logprobs=0, state=biased)]
    expected = torch.log_softmax(LOGITS[0], dim=-1).tolist()
    for sampled in (rows, [*rows, UNSAMPLEABLE]):
        result = bench.executor.launch(plan(len(sampled), len(sampled)), sampled).result(LONG_S)
        assert result.token_ids[:3] == [1, 1, 0]
        assert set(result.logprobs) == {0, 2}
        assert (result.logprobs[0].rank, result.logprobs[0].top_token_ids) == (1, (1, 2))
        assert result.logprobs[0].top_logprobs == pytest.approx((expected[1], expected[2]))
        assert (result.logprobs[2].rank, result.logprobs[2].top_token_ids) == (4, ())
        assert result.logprobs[2].logprob == pytest.approx(expected[0])


# ---- failure ----


def test_what_a_step_raises_comes_out_of_its_future_and_later_steps_fail_too(bench: Bench) -> None:
    bench.runner.failing[1] = failure = ValueError("out of memory")
    first, second = bench.executor.launch(plan(1), [GREEDY]), bench.executor.launch(plan(2), [GREEDY])
    assert first.exception(LONG_S) is failure
    late = second.exception(LONG_S)
    assert isinstance(late, EarlierFailure)
    assert late.__cause__ is failure
    with pytest.raises(EarlierFailure, match="a step before it failed: out of memory"):
        bench.executor.heartbeat()
    assert bench.runner.steps == [1]


def test_what_the_device_complains_of_later_ends_the_group_too(overlapping: Bench, monkeypatch: Any) -> None:
    failure = RuntimeError("an illegal memory access was encountered")
    monkeypatch.setattr(SlowCopy, "failure", failure)
    first, second = (overlapping.executor.launch(plan(step), [GREEDY]) for step in (1, 2))
    SlowCopy.may_land.set()
    assert first.exception(LONG_S) is failure
    assert isinstance(second.exception(LONG_S), EarlierFailure)
    with pytest.raises(EarlierFailure, match="illegal memory access"):
        overlapping.executor.heartbeat()
    overlapping.executor.shut_down()
    assert overlapping.ranks.heard == ["step 1", "step 2"]


def test_ranks_in_the_middle_of_a_failed_step_are_not_spoken_to(bench: Bench) -> None:
    bench.runner.failing[1] = ValueError("out of memory")
    bench.executor.launch(plan(1), [GREEDY]).exception(LONG_S)
    bench.executor.shut_down()
    assert bench.ranks.heard == ["step 1"]


def test_a_rank_that_is_gone_is_noticed_by_the_heartbeat() -> None:
    bench = Bench()
    bench.ranks.failure = RuntimeError("connection closed by peer")
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        bench.executor.heartbeat()
    bench.executor.shut_down()


# ---- the end ----


def test_no_thread_is_left_after_the_end_however_it_comes() -> None:
    before = step_threads()
    for fails, overlaps in [(False, False), (True, False), (False, True), (True, True)]:
        bench = Bench(overlaps=overlaps)
        if fails:
            bench.runner.failing[1] = ValueError("out of memory")
        bench.executor.launch(plan(1), [GREEDY]).exception(LONG_S)
        bench.executor.shut_down()
        bench.executor.shut_down()
        assert step_threads() == before
        with pytest.raises(RuntimeError, match="the executor was shut down"):
            bench.executor.launch(plan(2), [GREEDY])


def test_the_thread_ends_also_when_the_ranks_cannot_be_told() -> None:
    before = step_threads()
    bench = Bench()
    bench.ranks.failure = RuntimeError("connection closed by peer")
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        bench.executor.shut_down()
    assert step_threads() == before


def test_an_executor_that_nobody_has_any_more_leaves_no_thread() -> None:
    before = set(step_threads())
    bench = Bench(overlaps=True)
    bench.executor.launch(plan(1), [GREEDY]).result(LONG_S)
    threads = set(step_threads()) - before
    assert len(threads) == 2
    del bench
    gc.collect()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_calls_submitted_before_the_close_are_carried_out() -> None:
    thread, done = StepThread("steps"), []
    for number in range(100):
        thread.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    thread.close()
    assert done == list(range(100))
