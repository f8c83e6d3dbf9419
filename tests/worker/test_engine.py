"""The engine: requests in, tokens out, and exactly one end for each branch."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest
from engine_bench import CountingModel, EngineBench, request

from octavo.worker.engine import Engine
from octavo.worker.messages import Branch, FinishReason, RequestProgress, SamplingParams, SequenceUpdate, TokenLogprobs
from octavo.worker.sampling_row import SamplingRow, StepResult
from octavo.worker.step_plan import StepPlan

# ---- how a branch ends ----


def test_tokens_come_one_by_one_with_their_positions() -> None:
    bench = EngineBench()
    bench.submit(request())
    bench.run()
    assert bench.of("r") == [
        SequenceUpdate("r", 0, 0, (0,), None, 0),
        SequenceUpdate("r", 0, 1, (1,), None, 0),
        SequenceUpdate("r", 0, 2, (2,), FinishReason.LENGTH, 0),
    ]


@pytest.mark.parametrize(
    ("max_tokens", "min_tokens", "stop", "length", "reason"),
    [
        (1, 0, (), 1, FinishReason.LENGTH),
        (5, 0, (0,), 1, FinishReason.STOP),
        (5, 0, (2, 4), 3, FinishReason.STOP),
        (3, 0, (2,), 3, FinishReason.STOP),  # both at once: the model had ended
        (3, 0, (3,), 3, FinishReason.LENGTH),
        (5, 2, (2,), 3, FinishReason.STOP),  # two tokens are there, the third may be the end
        (5, 3, (3,), 4, FinishReason.STOP),
        (5, 2, (1,), 5, FinishReason.LENGTH),  # drawn all the same, too early to be the end
        (5, 0, (11,), 5, FinishReason.LENGTH),  # in the prompt
    ],
)
def test_a_branch_ends_where_it_must(
    max_tokens: int, min_tokens: int, stop: tuple[int, ...], length: int, reason: FinishReason
) -> None:
    bench = EngineBench()
    bench.submit(request(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop))
    bench.run()
    assert bench.tokens("r") == list(range(length))
    assert bench.reasons("r") == [reason]


def test_stop_tokens_are_banned_until_there_are_min_tokens() -> None:
    bench = EngineBench()
    bench.submit(request(max_tokens=4, min_tokens=2, stop_token_ids=(7, 8)))
    bench.run()
    assert [row.banned_token_ids for row in bench.model.rows] == [(7, 8), (7, 8), (), ()]


def test_a_row_says_how_its_token_is_drawn() -> None:
    bench = EngineBench()
    params = SamplingParams(max_tokens=9, seed=2**64 - 1, temperature=0.5, top_p=0.9, top_k=40)
    bench.submit(replace(request(), sampling=params, branches=(Branch(3, (0, 1)),)))
    bench.engine.step()
    assert bench.model.rows == [SamplingRow(2**64 - 1, 3, 2, 0.5, 0.9, 40)]


def test_a_deadline_ends_a_branch_with_what_there_is() -> None:
    bench = EngineBench()
    bench.submit(replace(request(max_tokens=9), timeout_s=2.0))
    bench.submit(request("other", max_tokens=9))
    bench.engine.step()
    bench.now = 1.9
    bench.engine.step()
    bench.now = 2.0
    bench.engine.step()
    assert bench.tokens("r") == [0, 1]
    assert bench.of("r")[-1] == SequenceUpdate("r", 0, 2, (), FinishReason.TIMEOUT, 0)
    assert bench.tokens("other") == [0, 1, 2]


def test_each_deadline_is_met_whatever_their_order() -> None:
    bench = EngineBench(max_num_seqs=1)
    for timeout_s in (9.0, 3.0, None, 6.0, 3.0):
        bench.submit(replace(request(str(timeout_s) + str(len(bench.updates)), max_tokens=40), timeout_s=timeout_s))
        bench.updates.append(("", SequenceUpdate("", 0, 0, ())))
    ended = []
    for now in (2.0, 3.0, 6.0, 9.0):
        bench.now = now
        bench.engine.step()
        bench.engine.check()
        ended.append(sum(update.finish_reason is FinishReason.TIMEOUT for _, update in bench.updates))
    assert ended == [0, 2, 3, 4]


def test_time_spent_waiting_counts() -> None:
    bench = EngineBench(max_num_seqs=1)
    bench.submit(request("running", max_tokens=20))
    bench.submit(replace(request("waiting"), timeout_s=1.0))
    bench.engine.step()
    bench.now = 1.0
    bench.engine.step()
    assert bench.of("waiting") == [SequenceUpdate("waiting", 0, 0, (), FinishReason.TIMEOUT)]


# ---- the time in the queue ----


def test_what_is_queued_too_long_ends_with_the_time_after_which_to_try_again() -> None:
    bench = EngineBench(max_num_seqs=1)
    bench.submit(request("running", max_tokens=20))
    bench.submit(replace(request("waiting"), queue_timeout_s=1.5))
    bench.step()
    bench.now = 1.4
    bench.step()
    assert bench.of("waiting") == []
    bench.now = 1.5
    bench.step()
    (update,) = bench.of("waiting")
    assert (update.finish_reason, update.error) == (
        FinishReason.OVERLOADED,
        "queue_timeout is 1.5 s, and the request waited longer",
    )
    assert update.retry_after_s is not None
    assert update.retry_after_s > 0
    assert bench.reasons("running") == []


def test_what_was_admitted_in_time_has_no_queue_deadline_any_more() -> None:
    """Also not when it is preempted, or when branches of it still wait."""
    bench = EngineBench(max_num_seqs=1)
    patient = replace(request(max_tokens=5), priority=1, queue_timeout_s=1.0, branches=(Branch(0), Branch(1)))
    bench.submit(patient)
    bench.step(2)
    bench.now = 5.0
    bench.submit(request("urgent", max_tokens=2))
    bench.run()
    assert bench.scheduler.counters.num_preemptions >= 1
    assert bench.reasons("r", 0) == bench.reasons("r", 1) == [FinishReason.LENGTH]


def test_all_branches_of_a_request_that_was_queued_too_long_end() -> None:
    bench = EngineBench(max_num_seqs=1)
    bench.submit(request("running", max_tokens=20))
    branches = (Branch(0), Branch(1), Branch(2, (0,)))
    bench.submit(replace(request(), queue_timeout_s=1.0, branches=branches))
    bench.step()
    bench.now = 1.0
    bench.step()
    assert [bench.reasons("r", branch) for branch in range(3)] == [[FinishReason.OVERLOADED]] * 3
    assert bench.scheduler.num_queued_requests == 0


# ---- aborts ----


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_an_abort_ends_a_request_and_frees_its_blocks_at_once(num_steps: int) -> None:
    bench = EngineBench(budget=4)
    bench.submit(request(max_tokens=9))
    for _ in range(num_steps):
        bench.engine.step()
    bench.engine.abort("r")
    bench.engine.check()
    assert bench.scheduler.pool.num_free_blocks == 32
    assert bench.reasons("r") == [FinishReason.ABORT]
    assert not bench.engine.has_work


def test_an_abort_of_what_is_not_there_is_harmless() -> None:
    bench = EngineBench()
    bench.engine.abort("never heard of")
    bench.submit(request())
    bench.run()
    bench.engine.abort("r")
    assert bench.reasons("r") == [FinishReason.LENGTH]


def test_a_gateway_that_is_gone_takes_its_requests_along_and_no_others() -> None:
    bench = EngineBench()
    bench.submit(request("mine"))
    bench.submit(replace(request("other"), gateway_id="other"))
    bench.engine.abort_gateway("gateway")
    bench.run()
    assert bench.reasons("mine") == [FinishReason.ABORT]
    assert bench.reasons("other") == [FinishReason.LENGTH]
    assert {gateway for gateway, update in bench.updates if update.request_id == "other"} == {"other"}


# ---- what is refused, repeated or continued ----


def test_what_can_never_fit_is_refused_at_once_with_the_numbers() -> None:
    bench = EngineBench(num_blocks=4)
    bench.submit(replace(request(prompt=range(12), max_tokens=5), branches=(Branch(0), Branch(1, (7,)))))
    message = "17 tokens need 5 KV blocks of 4 tokens, but the pool has 4"
    assert [(u.position, u.finish_reason, u.error) for u in (bench.of("r", 0) + bench.of("r", 1))] == [
        (0, FinishReason.ERROR, message),
        (1, FinishReason.ERROR, message),
    ]
    assert [(u.param, u.code) for u in bench.of()] == [("max_tokens", "context_length_exceeded")]
    assert bench.engine.num_requests == 0
    assert bench.engine.counters.finished[FinishReason.ERROR] == 2
    assert bench.engine.drain_progress() == (RequestProgress("r", prefilled=False, finished=True),)


def test_what_just_fits_is_not_refused() -> None:
    bench = EngineBench(num_blocks=4)
    bench.submit(request(prompt=range(12), max_tokens=4))
    bench.run()
    assert bench.tokens("r") == [0, 1, 2, 3]


def test_an_empty_prompt_is_refused() -> None:
    bench = EngineBench()
    bench.submit(request(prompt=range(0)))
    (update,) = bench.of("r")
    assert (update.finish_reason, update.error) == (
        FinishReason.ERROR,
        "the prompt has no tokens; at least 1 is needed",
    )


def test_a_request_without_branches_does_not_stay_for_ever() -> None:
    bench = EngineBench()
    bench.submit(replace(request(), branches=()))
    assert bench.engine.num_requests == 0
    assert bench.engine.drain_progress() == (RequestProgress("r", prefilled=False, finished=True),)


def test_a_request_that_arrives_twice_is_served_once() -> None:
    bench = EngineBench()
    bench.submit(request())
    bench.submit(request())
    bench.engine.step()
    bench.submit(request())
    bench.run()
    assert bench.tokens("r") == [0, 1, 2]
    assert bench.reasons("r") == [FinishReason.LENGTH]


def test_a_branch_goes_on_where_it_stopped_elsewhere() -> None:
    bench = EngineBench()
    bench.submit(replace(request(max_tokens=4), branches=(Branch(0, (0, 1)),)))
    bench.run()
    assert [(update.position, update.token_ids) for update in bench.of("r")] == [(2, (2,)), (3, (3,))]
    assert bench.reasons("r") == [FinishReason.LENGTH]


@pytest.mark.parametrize(("output", "reason"), [((0, 1, 2, 3), FinishReason.LENGTH), ((0, 9), FinishReason.STOP)])
def test_a_branch_that_was_complete_elsewhere_ends_and_the_others_go_on(
    output: tuple[int, ...], reason: FinishReason
) -> None:
    bench = EngineBench()
    branches = (Branch(0, output), Branch(1))
    bench.submit(replace(request(max_tokens=4, stop_token_ids=(9,)), branches=branches))
    assert bench.of("r", 0) == [SequenceUpdate("r", 0, len(output), (), reason)]
    assert bench.engine.has_work
    bench.run()
    assert bench.tokens("r", 1) == [0, 1, 2, 3]
    assert bench.reasons("r", 1) == [FinishReason.LENGTH]
    assert bench.engine.num_requests == 0


def test_a_request_that_was_complete_elsewhere_ends_at_once() -> None:
    bench = EngineBench()
    bench.submit(request("first"))
    bench.submit(replace(request(max_tokens=2), branches=(Branch(0, (0, 1)),)))
    assert bench.reasons("r") == [FinishReason.LENGTH]
    bench.run()
    assert bench.reasons("first") == [FinishReason.LENGTH]


def test_branches_of_a_request_end_each_for_itself() -> None:
    bench = EngineBench()
    bench.submit(replace(request(max_tokens=3), branches=(Branch(0), Branch(1, (0,)))))
    bench.run()
    assert (bench.tokens("r", 0), bench.tokens("r", 1)) == ([0, 1, 2], [1, 2])
    assert bench.reasons("r", 0) == bench.reasons("r", 1) == [FinishReason.LENGTH]


# ---- what others learn ----


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    bench = EngineBench()
    bench.submit(request("first"))
    bench.run()
    bench.submit(request("second"))
    bench.run()
    assert {update.num_cached_tokens for update in bench.of("first")} == {0}
    assert {update.num_cached_tokens for update in bench.of("second")} == {4}


def test_the_router_hears_of_arrival_prefill_and_end() -> None:
    bench = EngineBench(budget=4)
    bench.submit(request(max_tokens=2))
    assert bench.engine.drain_progress() == (RequestProgress("r", prefilled=False, finished=False),)
    bench.engine.step()
    assert bench.engine.drain_progress() == ()
    bench.engine.step()
    assert bench.engine.drain_progress() == (RequestProgress("r", prefilled=True, finished=False),)
    bench.engine.step()
    assert bench.engine.drain_progress() == (RequestProgress("r", prefilled=True, finished=True, num_output_tokens=2),)


def test_the_end_still_says_that_the_prompt_was_computed_and_what_was_cached() -> None:
    """Whoever missed the report before has the same to learn."""
    bench = EngineBench()
    bench.submit(request("first"))
    bench.run()
    bench.submit(replace(request(max_tokens=2), branches=(Branch(0), Branch(1))))
    bench.engine.step()
    assert bench.engine.live_progress() == (RequestProgress("r", True, False, num_cached_tokens=4),)
    bench.engine.drain_progress()
    bench.run()
    assert bench.engine.drain_progress() == (
        RequestProgress("r", True, True, num_cached_tokens=4, num_output_tokens=4),
    )


def test_a_request_id_used_again_starts_anew() -> None:
    bench = EngineBench()
    bench.submit(request())
    bench.run()
    bench.submit(request())
    assert bench.engine.drain_progress() == (RequestProgress("r", prefilled=False, finished=False),)
    bench.run()
    assert bench.tokens("r") == [0, 1, 2, 0, 1, 2]


def test_counters_count_what_was_done() -> None:
    bench = EngineBench(budget=4)
    bench.submit(request(max_tokens=2))
    bench.run()
    counters = bench.engine.counters
    assert (counters.num_steps, counters.num_computed_tokens) == (3, 7)  # chunks of 4 and 2, one decode
    assert (counters.num_prompt_tokens, counters.num_generation_tokens) == (6, 2)
    assert counters.finished[FinishReason.LENGTH] == 1


def test_speeds_are_learned_from_steps() -> None:
    bench = EngineBench()

    class SlowModel(CountingModel):
        def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
            bench.now += 0.001 * plan.token_ids.size
            return super().launch(plan, rows)

    engine = Engine(bench.scheduler, SlowModel(), clock=lambda: bench.now, emit=lambda gateway, update: None)
    engine.submit(request(prompt=range(41)))
    engine.step()
    assert engine.speed.prefill_tokens_per_s == pytest.approx(40 / 0.041)
    assert engine.speed.decode_step_s == 0.0
    engine.step()
    assert engine.speed.decode_step_s == pytest.approx(0.001)


def test_a_step_that_was_held_up_teaches_no_speed() -> None:
    bench = EngineBench()

    class HeldUp(CountingModel):
        def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
            bench.now += 1.0
            given: Future[StepResult] = Future()
            given.set_result(replace(super().launch(plan, rows).result(), was_held_up=True))
            return given

    engine = Engine(bench.scheduler, HeldUp(), clock=lambda: bench.now, emit=lambda gateway, update: None)
    engine.submit(request(prompt=range(41)))
    engine.step()
    engine.step()
    assert (engine.speed.prefill_tokens_per_s, engine.speed.decode_step_s) == (0.0, 0.0)
    assert engine.counters.num_steps == 2


def test_a_step_that_scores_a_prompt_teaches_no_speed() -> None:
    """Scores take a while that no prompt of another request will take."""
    bench = EngineBench()

    class Scoring(CountingModel):
        def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
            bench.now += 1.0 if len(plan.scored) else 0.01
            given: Future[StepResult] = Future()
            scores = tuple((TokenLogprobs(-1.0, 1),) * count for count in plan.scored[:, 1].tolist())
            given.set_result(replace(super().launch(plan, rows).result(), prompt_logprobs=scores))
            return given

    engine = Engine(bench.scheduler, Scoring(), clock=lambda: bench.now, emit=lambda gateway, update: None)
    engine.submit(request(prompt=range(41), num_prompt_logprobs=0))
    engine.step()
    assert engine.speed.prefill_tokens_per_s == 0.0
    engine.submit(request("plain", prompt=range(100, 141)))
    engine.step()
    assert engine.speed.prefill_tokens_per_s == pytest.approx(40 / 0.01)


def test_a_failing_model_is_not_hidden() -> None:
    bench = EngineBench()
    bench.submit(request())
    bench.model.failure = RuntimeError("a rank is gone")
    with pytest.raises(RuntimeError, match="a rank is gone"):
        bench.engine.step()


def test_nothing_to_do_is_no_step() -> None:
    assert EngineBench().engine.step() is False


def test_a_request_whose_token_cannot_be_sampled_ends_alone() -> None:
    bench = EngineBench()
    bench.model.unsampled_seed = 7
    bench.submit(request("bad", seed=7))
    bench.submit(request("good", seed=1))
    bench.run()
    assert bench.reasons("bad") == [FinishReason.ERROR]
    assert "sampled" in (bench.of("bad")[-1].error or "")
    assert bench.reasons("good") == [FinishReason.LENGTH]
