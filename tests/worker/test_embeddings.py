"""Embeddings: a prompt's last hidden states, of the last token or the mean, as transformers has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_bench import EngineBench
from model_engine import Given, Group, ModelEngine
from random_llama import CONTEXT, RandomLlama, random_prompt

from octavo.worker.messages import Branch, FinishReason, Pooling, Request, SamplingParams

POOLINGS = [Pooling.LAST, Pooling.MEAN]


def request(request_id: str, prompt: tuple[int, ...], pooling: Pooling | None, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=0 if pooling else 2, seed=1, temperature=0.0)
    return Request(request_id, "g", "m", prompt, b"", sampling, pooling=pooling, **fields)


def assert_equal_to(llama: RandomLlama, prompt: tuple[int, ...], pooling: Pooling, given: Given) -> None:
    hidden = llama.hidden(prompt)
    expected = hidden[-1] if pooling is Pooling.LAST else hidden.mean(axis=0)
    assert given.embedding is not None
    np.testing.assert_allclose(given.embedding, expected, atol=1e-4)
    assert (given.token_ids, given.reason) == ([], FinishReason.STOP)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(("budget", "plans_ahead"), [(256, False), (24, True)])
def test_equal_to_transformers_cold_warm_and_among_others(
    llama: RandomLlama, group: Group, pooling: Pooling, budget: int, plans_ahead: bool
) -> None:
    bench = ModelEngine(group, budget=budget, plans_ahead=plans_ahead)
    for length in (1, 15, 16, 33, 160, CONTEXT):
        prompt = random_prompt(length)
        bench.run(request(f"cold {length}", prompt, pooling))
        bench.run(
            request(f"warm {length}", prompt, pooling),
            request(f"other {length}", prompt[: CONTEXT - 2], None),
            request(f"both {length}", (*prompt[:32], 5, 6), Pooling.LAST),
        )
        for name in ("cold", "warm"):
            assert_equal_to(llama, prompt, pooling, bench.of(f"{name} {length}"))
        assert_equal_to(llama, (*prompt[:32], 5, 6), Pooling.LAST, bench.of(f"both {length}"))
        assert len(bench.of(f"other {length}").token_ids) == 2


def test_the_last_token_may_use_the_cache_and_the_mean_may_not(group: Group) -> None:
    bench, prompt = ModelEngine(group), random_prompt(160)
    bench.run(request("plain", prompt, None))
    bench.run(request("last", prompt, Pooling.LAST), request("mean", prompt, Pooling.MEAN))
    assert bench.of("last").num_cached_tokens == 159
    assert bench.of("mean").num_cached_tokens == 0


@pytest.mark.parametrize("pooling", POOLINGS)
def test_preempted(llama: RandomLlama, group: Group, pooling: Pooling) -> None:
    for plans_ahead in (False, True):
        bench = ModelEngine(group, num_blocks=12, budget=32, plans_ahead=plans_ahead)
        prompt = random_prompt(160)
        bench.engine.submit(request("pooled", prompt, pooling, priority=1))
        bench.step(3)
        bench.run(request("urgent", random_prompt(60, seed=1), None, priority=0))
        assert bench.engine.scheduler.counters.num_preemptions >= 1
        assert_equal_to(llama, prompt, pooling, bench.of("pooled"))


def test_an_end_like_others(group: Group) -> None:
    bench = ModelEngine(group, budget=24)
    bench.run(request("r", random_prompt(50), Pooling.MEAN))
    progress = bench.progress["r"]
    assert (progress.prefilled, progress.finished, progress.num_output_tokens) == (True, True, 0)
    assert bench.engine.counters.finished[FinishReason.STOP] == 1
    bench.engine.submit(request("aborted", random_prompt(50), Pooling.MEAN))
    bench.step(2)
    bench.engine.abort("aborted")
    bench.run()
    assert bench.of("aborted") == Given(reason=FinishReason.ABORT, num_cached_tokens=0)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"branches": (Branch(0), Branch(1))}, "n"),
        ({"sampling": SamplingParams(max_tokens=0, seed=1, beam_width=2)}, "beam_width"),
        ({"sampling": SamplingParams(max_tokens=0, seed=1, num_prompt_logprobs=1)}, "prompt_logprobs"),
    ],
)
def test_what_one_vector_cannot_answer_is_refused(changes: dict[str, Any], param: str) -> None:
    bench = EngineBench()
    bench.submit(replace(request("r", (1, 2, 3), Pooling.MEAN), **changes))
    assert [(update.finish_reason, update.param) for update in bench.of()] == [(FinishReason.ERROR, param)]


def test_a_model_without_numbers_gives_an_error(group: Group) -> None:
    bench = ModelEngine(group)
    bench.engine.submit(request("r", random_prompt(50), Pooling.MEAN))
    sequence = bench.engine._live["r"]
    sequence.add_hidden(np.full(72, np.nan, np.float32))
    bench.run()
    assert bench.of("r").reason is FinishReason.ERROR
    assert "no number" in str(bench.of("r").error)
