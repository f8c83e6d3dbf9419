"""Log-probabilities of prompts: transformers' own, each told once and ahead of the output, whatever is cached, cut
into chunks, preempted or computed beside it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from engine_bench import CountingModel, EngineBench
from model_engine import Given, Group, ModelEngine
from random_llama import CONTEXT, LIMITS, VOCABULARY, RandomLlama, random_prompt

from octavo.worker.messages import Branch, FinishReason, Pooling, Request, SamplingParams, TokenLogprobs
from octavo.worker.sampling_row import SamplingRow, StepResult
from octavo.worker.step_plan import GraphKey, StepPlan

TOLERANCE = 1e-3


def request(request_id: str, prompt: tuple[int, ...], k: int | None = 3, **fields: Any) -> Request:
    sampling = {"max_tokens": 2, "seed": 1, "temperature": 0.0, "num_prompt_logprobs": k}
    of_request = {name: fields.pop(name) for name in list(fields) if name in Request.__dataclass_fields__}
    return Request(request_id, "g", "m", prompt, b"", SamplingParams(**(sampling | fields)), **of_request)


def assert_equal_to(llama: RandomLlama, prompt: tuple[int, ...], given: Given, k: int = 3) -> None:
    expected = llama.prompt_logprobs(prompt)
    assert len(given.prompt_logprobs) == len(prompt) - 1
    for row, token, told in zip(expected, prompt[1:], given.prompt_logprobs, strict=True):
        assert told.logprob == pytest.approx(row[token].item(), abs=TOLERANCE)
        assert abs(told.rank - 1 - int((row > row[token]).sum())) <= int(((row - row[token]).abs() < TOLERANCE).sum())
        assert told.top_logprobs == pytest.approx(row.topk(k).values.tolist(), abs=TOLERANCE)
        assert told.top_logprobs == pytest.approx(row[list(told.top_token_ids)].tolist(), abs=TOLERANCE)


def test_bug_041_equal_to_transformers_cold_warm_and_among_others(llama: RandomLlama, group: Group) -> None:
    for budget, plans_ahead in ((256, False), (24, True)):
        bench = ModelEngine(group, budget=budget, plans_ahead=plans_ahead)
        for length in (15, 16, 17, 33, 160):
            prompt = random_prompt(length)
            bench.run(request(f"cold {length}", prompt))
            bench.run(request(f"plain {length}", prompt, None))
            other = (*prompt[:32], *random_prompt(9))
            bench.run(
                request(f"warm {length}", prompt),
                request(f"between {length}", other, None),
                request(f"again {length}", prompt, num_logprobs=0, max_tokens=3),
            )
            for name in ("cold", "warm", "again"):
                given = bench.of(f"{name} {length}")
                assert_equal_to(llama, prompt, given)
                assert given.num_cached_tokens == 0
                assert given.token_ids[:2] == bench.of(f"plain {length}").token_ids
            assert bench.of(f"plain {length}").num_cached_tokens == (length - 1) // 16 * 16 or length % 16 == 0
            assert not bench.of(f"between {length}").prompt_logprobs


def test_each_gets_so_many_of_the_likeliest_as_it_wants(llama: RandomLlama, group: Group) -> None:
    bench = ModelEngine(group, budget=100)
    prompts = {k: random_prompt(60, seed=k) for k in (0, 1, 20, VOCABULARY + 5)}
    bench.run(*(request(str(k), prompt, k) for k, prompt in prompts.items()))
    for k, prompt in prompts.items():
        assert_equal_to(llama, prompt, bench.of(str(k)), min(k, VOCABULARY))
        assert all(len(told.top_token_ids) == min(k, VOCABULARY) for told in bench.of(str(k)).prompt_logprobs)


def test_none_is_lost_or_told_twice_when_the_prompt_is_preempted(llama: RandomLlama, group: Group) -> None:
    """Three of its chunks are computed when a more urgent request takes its blocks; some of them are still cached."""
    for plans_ahead in (False, True):
        bench = ModelEngine(group, num_blocks=12, budget=32, plans_ahead=plans_ahead)
        prompt = random_prompt(160)
        bench.engine.submit(request("scored", prompt, priority=1))
        bench.step(3)
        bench.run(request("urgent", random_prompt(60, seed=1), None, priority=0))
        assert bench.engine.scheduler.counters.num_preemptions >= 1
        assert_equal_to(llama, prompt, bench.of("scored"))


def test_bug_075_what_is_scored_once_is_not_scored_again(llama: RandomLlama, group: Group) -> None:
    """A prompt that is computed again after a preemption of its output may be taken from the cache."""
    bench = ModelEngine(group, num_blocks=20, budget=256)
    prompt = random_prompt(160)
    bench.engine.submit(request("scored", prompt, priority=1, max_tokens=20))
    bench.step(4)
    assert len(bench.of("scored").token_ids) == 4
    bench.run(request("urgent", random_prompt(170, seed=1), None, priority=0))
    assert bench.engine.scheduler.counters.num_preemptions == 1
    assert_equal_to(llama, prompt, bench.of("scored"))
    assert bench.engine.scheduler.counters.num_recomputed_tokens < 160


def test_branches_share_what_is_told_once(llama: RandomLlama, group: Group) -> None:
    bench, prompt = ModelEngine(group, budget=24), random_prompt(50)
    bench.run(request("r", prompt, branches=(Branch(0), Branch(1), Branch(2)), temperature=1.0))
    assert_equal_to(llama, prompt, bench.of("r"))
    for branch in (1, 2):
        assert not bench.of("r", branch).prompt_logprobs
        assert len(bench.of("r", branch).token_ids) == 2


def test_beams_begin_after_what_is_told(llama: RandomLlama, group: Group) -> None:
    bench, prompt = ModelEngine(group, budget=24), random_prompt(50)
    bench.run(request("r", prompt, beam_width=2), request("alone", prompt, None, beam_width=2))
    assert_equal_to(llama, prompt, bench.of("r"))
    assert bench.of("r").token_ids == bench.of("alone").token_ids


def test_a_request_that_had_output_elsewhere_was_told_there(llama: RandomLlama, group: Group) -> None:
    bench, prompt = ModelEngine(group), random_prompt(50)
    bench.run(request("plain", prompt, None, max_tokens=3))
    first, *others = bench.of("plain").token_ids
    bench.run(request("begun", prompt, max_tokens=3, branches=(Branch(0, (first,)),)))
    assert bench.of("begun").token_ids == others
    assert not bench.of("begun").prompt_logprobs
    assert bench.of("begun").num_cached_tokens == 48
    bench.run(request("not begun", prompt, attempt=2))
    assert_equal_to(llama, prompt, bench.of("not begun"))


def test_bug_081_scoring_a_prompt_as_long_as_the_context(llama: RandomLlama, group: Group) -> None:
    for budget in (256, 100):
        bench = ModelEngine(group, budget=budget, plans_ahead=True)
        for length in (CONTEXT - 1, CONTEXT):
            prompt = random_prompt(length)
            bench.run(request(str(length), prompt, max_tokens=0))
            given = bench.of(str(length))
            assert (given.token_ids, given.reason) == ([], FinishReason.LENGTH)
            assert_equal_to(llama, prompt, given)
    bench.run(request("too long", random_prompt(CONTEXT + 1), max_tokens=0))
    assert bench.of("too long").reason is FinishReason.ERROR
    assert "257 tokens and max_tokens is 0" in str(bench.of("too long").error)


def test_nothing_drawn_is_an_end_like_others(group: Group) -> None:
    bench = ModelEngine(group, budget=24)
    one, two = (7,), random_prompt(50)
    branches = (Branch(0), Branch(1))
    bench.run(request("one", one, max_tokens=0), request("two", two, max_tokens=0, branches=branches))
    assert bench.of("one") == Given(reason=FinishReason.LENGTH, num_cached_tokens=0)
    assert len(bench.of("two").prompt_logprobs) == 49
    assert [bench.of("two", branch).reason for branch in (0, 1)] == [FinishReason.LENGTH] * 2
    for name in ("one", "two"):
        progress = bench.progress[name]
        assert (progress.prefilled, progress.finished, progress.num_output_tokens) == (True, True, 0)
    assert bench.engine.counters.num_generation_tokens == 0
    assert bench.engine.counters.finished[FinishReason.LENGTH] == 3


def test_nothing_drawn_and_nothing_wanted_is_refused() -> None:
    bench = EngineBench()
    bench.submit(request("r", (1, 2, 3), None, max_tokens=0))
    update = bench.of()[0]
    assert (update.finish_reason, update.param) == (FinishReason.ERROR, "max_tokens")


@pytest.mark.parametrize(("k", "num_waits"), [(None, 1), (3, 0)])
def test_a_scored_prompt_follows_nobody(group: Group, k: int | None, num_waits: int) -> None:
    bench, prompt = ModelEngine(group, budget=32), random_prompt(160)
    bench.engine.submit(request("long", prompt, None))
    bench.engine.submit(request("short", prompt[:60], k))
    bench.step()
    assert bench.engine.scheduler.counters.num_prefix_waits == num_waits
    bench.run()
    assert bench.of("short").num_cached_tokens == (0 if k else 48)


def test_others_may_follow_a_scored_prompt(group: Group) -> None:
    bench, prompt = ModelEngine(group, budget=32), random_prompt(160)
    bench.run(request("long", prompt), request("short", prompt[:60], None))
    assert bench.engine.scheduler.counters.num_prefix_waits == 1
    assert bench.of("short").num_cached_tokens == 48


def test_an_abort_frees_what_is_scored(group: Group) -> None:
    bench = ModelEngine(group, budget=32, plans_ahead=True)
    bench.engine.submit(request("r", random_prompt(100)))
    bench.step(2)
    bench.engine.abort("r")
    bench.run()
    assert bench.of("r").reason is FinishReason.ABORT
    assert len(bench.of("r").prompt_logprobs) == 32


def test_a_prompt_without_numbers_ends_its_request_alone() -> None:
    class NoNumber(CountingModel):
        def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
            scores = tuple((TokenLogprobs(float("nan"), 0),) * count for _, count, _, _ in plan.scored.tolist())
            result: Future[StepResult] = Future()
            result.set_result(replace(super().launch(plan, rows).result(), prompt_logprobs=scores))
            return result

    bench = EngineBench()
    bench.engine._executor = NoNumber()
    bench.submit(request("scored", (1, 2, 3)))
    bench.submit(request("r", (4, 5, 6), None))
    bench.run()
    assert bench.reasons("scored") == [FinishReason.ERROR]
    assert "prompt" in str(bench.of("scored")[-1].error)
    assert bench.reasons("r") == [FinishReason.LENGTH]
    assert bench.engine.counters.num_nan_rows == 2


def test_a_step_that_scores_is_not_played_back(llama: RandomLlama, start_group: Any) -> None:
    """Though every sequence has one token in it: a graph gives logits and nothing else."""
    with start_group(llama.folder, limits=LIMITS, graphs=True) as group:
        runner, executor = group
        executor.heartbeat()
        assert runner.graphs.holds(GraphKey(8, CONTEXT))
        bench, prompt = ModelEngine(group, budget=1), random_prompt(20)
        bench.run(request("r", prompt))
        assert_equal_to(llama, prompt, bench.of("r"))


def test_two_ranks_read_prompts_as_one(llama: RandomLlama, start_group: Any) -> None:
    """Beside others, in chunks, with logits of several slices in one step."""
    with start_group(llama.folder, 2, limits=LIMITS) as group:
        bench = ModelEngine(group, budget=200, plans_ahead=True)
        prompts = [random_prompt(length) for length in (160, 33, 90)]
        pooled = request("mean", prompts[0], None, max_tokens=0, pooling=Pooling.MEAN)
        bench.run(*(request(str(number), prompt) for number, prompt in enumerate(prompts)), pooled)
        for number, prompt in enumerate(prompts):
            assert_equal_to(llama, prompt, bench.of(str(number)))
        assert bench.of("mean").embedding == pytest.approx(llama.hidden(prompts[0]).mean(axis=0), abs=1e-4)
