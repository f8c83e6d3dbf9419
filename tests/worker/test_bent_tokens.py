"""Penalties, bias, and tokens that are banned or allowed: what transformers and OpenAI's formulas give, however the
engine comes to compute it. Log-probabilities are those of the model all the while."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_bench import EngineBench, request
from model_engine import Given, TinyModel
from torch import Tensor
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from octavo.worker.messages import Branch, FinishReason, Request, SamplingParams

MAX_TOKENS = 14
NUM_LIKELIEST = 5

WISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 2.0},
    "all penalties": {"repetition_penalty": 1.3, "presence_penalty": -0.7, "frequency_penalty": 1.1},
    "bias": {"logit_bias": ((7, 9.0), (40, 6.5), (90, -100.0)), "presence_penalty": 3.0},
    "allowed": {"allowed_token_ids": (3, 32, 33, 64, 95), "frequency_penalty": 0.5},
    "bad words": {"bad_words": ((5,), (3, 7), (11, 3), (8, 9, 10)), "allowed_token_ids": (3, 5, 7, 8, 9, 10, 11)},
}

CONDITIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "cached": {},
    "batch": {},
    "chunked": {"budget": 9},
    "preempted": {"num_blocks": 26},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("model"))


def wish(name: str, **fields: Any) -> Request:
    """A greedy request; its prompt ends with the beginning of a bad word."""
    number = list(WISHES).index(name)
    prompt = (*[number + 1] * 4, *range(20, 30), 3, 7, number + 1, 11)
    sampling = {"temperature": 0.0, "num_logprobs": NUM_LIKELIEST, "max_tokens": MAX_TOKENS, "seed": 5}
    return Request(name, "gateway", "model", prompt, b"", SamplingParams(**(sampling | WISHES[name] | fields)))


# ---- what it should be ----


def bent(logits: Tensor, prompt: list[int], output: list[int], sampling: SamplingParams) -> Tensor:
    """The logits [vocabulary] that are drawn from, by the definitions."""
    tokens = torch.tensor([prompt + output])
    logits = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(tokens, logits[None].clone())[0]
    for token, count in Counter(output).items():
        logits[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    for token, value in sampling.logit_bias:
        logits[token] += value
    if sampling.allowed_token_ids is not None:
        banned = set(range(logits.numel())) - set(sampling.allowed_token_ids)
        logits[list(banned)] = -torch.inf
    if sampling.bad_words:
        words = [list(word) for word in sampling.bad_words]
        logits = NoBadWordsLogitsProcessor(words)(tokens, logits[None])[0]
    return logits


@torch.inference_mode()
def expected(model: TinyModel, request: Request) -> tuple[list[int], Tensor]:
    """Tokens, and for each the model's log-probabilities of the whole vocabulary."""
    prompt, output, log_probs = list(request.prompt_token_ids), [], []
    for _ in range(request.sampling.max_tokens):
        logits = model.reference(torch.tensor([prompt + output])).logits[0, -1]
        log_probs.append(logits.log_softmax(dim=-1))
        output.append(int(bent(logits, prompt, output, request.sampling).argmax()))
    return output, torch.stack(log_probs)


@pytest.fixture(scope="module")
def answers(model: TinyModel) -> dict[str, tuple[list[int], Tensor]]:
    return {name: expected(model, wish(name)) for name in WISHES}


def check(given: Given, answer: tuple[list[int], Tensor], start: int = 0) -> None:
    tokens, log_probs = answer[0][start:], answer[1][start:]
    assert given.token_ids == tokens
    assert given.reason is FinishReason.LENGTH
    told = given.logprobs
    chosen = log_probs.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor([each.logprob for each in told]), chosen, atol=1e-3, rtol=0)
    assert [each.rank for each in told] == (1 + (log_probs > chosen[:, None]).sum(dim=1)).tolist()
    best = log_probs.topk(NUM_LIKELIEST)
    assert [list(each.top_token_ids) for each in told] == best.indices.tolist()
    torch.testing.assert_close(torch.tensor([each.top_logprobs for each in told]), best.values, atol=1e-3, rtol=0)


# ---- what it is ----


@pytest.mark.parametrize("ahead", ["", "ahead", "ahead, overlapping"])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_case_bug_047_tokens_and_log_probabilities_are_the_same_in_all_conditions(
    model: TinyModel, answers: dict[str, tuple[list[int], Tensor]], condition: str, ahead: str
) -> None:
    requests = [wish(name) for name in WISHES]
    how = {"plans_ahead": bool(ahead), "overlaps": "overlapping" in ahead}
    with model.engine(**CONDITIONS[condition], **how) as engine:
        given: dict[tuple[str, int], Given] = {}
        if condition == "cached":
            engine.run(*requests)
        for batch in [[each] for each in requests] if condition == "alone" else [requests]:
            given |= engine.run(*batch)
        assert (engine.engine.scheduler.counters.num_preemptions > 0) == (condition == "preempted")
        assert (given["plain", 0].num_cached_tokens == 16) == (condition == "cached")
    for name, answer in answers.items():
        check(given[name, 0], answer)


def test_the_wishes_differ_from_each_other(answers: dict[str, tuple[list[int], Tensor]]) -> None:
    assert len({tuple(tokens) for tokens, _ in answers.values()}) == len(WISHES)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", WISHES)
def test_a_request_that_moves_goes_on_as_it_would_have(
    model: TinyModel, answers: dict[str, tuple[list[int], Tensor]], name: str, ahead: bool
) -> None:
    so_far = tuple(answers[name][0][:6])
    with model.engine(plans_ahead=ahead) as engine:
        given = engine.run(replace(wish(name), branches=(Branch(0, so_far),)))
    check(given[name, 0], answers[name], start=6)


@pytest.mark.parametrize("plans_ahead", [False, True])
@pytest.mark.parametrize("budget", [256, 7])
def test_branches_are_penalised_each_for_itself(model: TinyModel, plans_ahead: bool, budget: int) -> None:
    """Together, and with a slot for two of them, they draw what each draws alone."""
    drawn = wish("all penalties", temperature=1.2, seed=7)
    branches = tuple(Branch(index) for index in range(4))
    with model.engine(plans_ahead=plans_ahead, budget=budget) as engine:
        together = engine.run(replace(drawn, branches=branches))
        alone = [engine.run(replace(drawn, branches=(branch,)))["all penalties", branch.index] for branch in branches]
    assert [together["all penalties", index].token_ids for index in range(4)] == [each.token_ids for each in alone]
    assert len({tuple(each.token_ids) for each in alone}) == 4


def test_min_p_is_handed_on() -> None:
    bench = EngineBench()
    bench.submit(request(max_tokens=1, min_p=0.3))
    bench.run()
    assert [row.min_p for row in bench.model.rows] == [0.3]


def test_stop_tokens_cannot_be_drawn_before_there_are_min_tokens(model: TinyModel) -> None:
    """Of two tokens that are allowed one stops; without min_tokens it comes first."""
    stopping = {"allowed_token_ids": (3, 9), "stop_token_ids": (3, 9)}
    with model.engine() as engine:
        first = engine.run(wish("plain", **stopping))["plain", 0]
        stop = first.token_ids[0]
        given = engine.run(wish("plain", **(stopping | {"stop_token_ids": (stop,)}), min_tokens=4))["plain", 0]
    assert (first.reason, len(first.token_ids)) == (FinishReason.STOP, 1)
    assert stop not in given.token_ids[:4]


# ---- requests that ask for what cannot be ----

IMPOSSIBLE = {"allowed_token_ids": (5, 6), "bad_words": ((5,), (6,))}


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("plans_ahead", [False, True])
def test_a_row_in_which_nothing_is_left_ends_its_request_alone(
    model: TinyModel, answers: dict[str, tuple[list[int], Tensor]], plans_ahead: bool, overlaps: bool
) -> None:
    with model.engine(plans_ahead=plans_ahead, overlaps=overlaps) as engine:
        given = engine.run(wish("repetition"), replace(wish("plain", **IMPOSSIBLE), request_id="never"), wish("bias"))
        assert engine.engine.counters.num_nan_rows == 0
    ended = given["never", 0]
    assert (ended.reason, ended.param, ended.token_ids) == (FinishReason.ERROR, "allowed_token_ids", [])
    assert "allowed_token_ids and bad_words exclude each other" in (ended.error or "")
    for name in ("repetition", "bias"):
        check(given[name, 0], answers[name])


def test_it_may_be_some_tokens_later(model: TinyModel) -> None:
    """After 6 nothing may come; 6 is all there is, and it may come first."""
    with model.engine() as engine:
        ended = engine.run(wish("plain", allowed_token_ids=(6,), bad_words=((6, 6),)))["plain", 0]
    assert ended.token_ids == [6]
    assert ended.error == (
        "no token is left to draw as output token 2: allowed_token_ids and bad_words exclude each other"
    )


def test_tokens_beyond_the_vocabulary_are_not_written_to(model: TinyModel) -> None:
    strange = {
        "logit_bias": ((4_000_000, 5.0), (7, 50.0)),
        "bad_words": ((5_000_000,),),
        "allowed_token_ids": (7, 9999),
    }
    with model.engine() as engine:
        assert set(engine.run(wish("plain", **strange))["plain", 0].token_ids) == {7}
