"""Whatever happens in a tiny pool, each request on the real model gives what it gives alone.

A longer run: ``tests/differential/run.py``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from differential import MOST_EXCUSED, Round, not_reached
from judge import NEAR_TIE, Judge, Verdict, is_near_best, margin_of
from lab import Delivered, Lab
from random_requests import Text

from octavo.kernels.noise import gumbel_noise
from octavo.worker.messages import Branch, FinishReason, Request, SamplingParams
from octavo.worker.sampling_row import SamplingRow

NUM_ROUNDS = 4
"""With and without planning ahead, with and without beam searches."""

REQUESTS_A_ROUND = 75
ALONE_EVERY = 15
"""All outputs are followed token by token; of so many requests one is also run truly alone, and every beam search."""


@pytest.mark.timeout(600)
def test_every_output_is_the_one_of_a_run_alone(lab: Lab, judge: Judge, text: Text) -> None:
    """Case BUG-069: nested prefixes under constant eviction, with aborts; every output compared, blocks accounted for
    after every step."""
    totals, wrong = Counter[str](), list[str]()
    for seed in range(NUM_ROUNDS):
        this = Round(lab, text, seed, REQUESTS_A_ROUND)
        this.judge(judge, this.serve(), alone_every=ALONE_EVERY)
        totals += this.totals
        wrong += this.wrong
        print(*this.excused, sep="\n")
    totals["run alone"] = judge.num_run_alone
    print(dict(totals))
    assert not wrong, "\n".join(wrong)
    assert totals["near-tie"] <= MOST_EXCUSED * totals["outputs"], "more near-ties than rounding explains"
    assert totals["requests"] == NUM_ROUNDS * REQUESTS_A_ROUND
    assert not not_reached(totals)


# ---- near-ties ----

LITTLE, MUCH = NEAR_TIE / 2, NEAR_TIE * 20


def row(seed: int = 0, temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = None) -> SamplingRow:
    return SamplingRow(seed, branch=1, position=3, temperature=temperature, top_p=top_p, top_k=top_k)


def noise(seed: int, vocab_size: int) -> torch.Tensor:
    return gumbel_noise(torch.tensor([seed]), torch.tensor([1]), torch.tensor([3]), vocab_size)[0]


def near_best(logits: torch.Tensor, of: SamplingRow) -> list[int]:
    return [token for token in range(len(logits)) if is_near_best(logits, of, token)]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_two_best_values_that_nearly_tie_excuse_each_other(temperature: float) -> None:
    values = torch.tensor([0.0, 1.0, 1.0 - LITTLE, 1.0 - MUCH], dtype=torch.float64)
    logits = (values - noise(0, 4)) * temperature if temperature else values
    assert near_best(logits.float(), row(temperature=temperature)) == [1, 2]


def drawn_by(token: int, logits: torch.Tensor) -> int:
    """A seed whose noise prefers ``token``."""
    return next(seed for seed in range(1000) if int((logits + noise(seed, len(logits))).argmax()) == token)


@pytest.mark.parametrize(("gap", "is_excused"), [(LITTLE, True), (MUCH, False)])
def test_what_top_k_nearly_leaves_is_excused(gap: float, is_excused: bool) -> None:
    logits = torch.tensor([3.0, 2.0, 2.0 - gap, 1.0])
    assert (2 in near_best(logits, row(drawn_by(2, logits), top_k=2))) == is_excused


@pytest.mark.parametrize(("gap", "is_excused"), [(LITTLE, True), (MUCH, False)])
def test_what_top_p_nearly_leaves_is_excused(gap: float, is_excused: bool) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert (2 in near_best(logits, row(drawn_by(2, logits), top_p=0.8 - gap))) == is_excused


def test_the_margin_of_a_search_is_that_of_the_last_chosen_and_the_first_that_is_not() -> None:
    rows = [[(1, -1.0), (2, -2.0)], [(3, -1.4), (1, -3.0)]]
    two, one = SamplingParams(5, seed=0, beam_width=2), SamplingParams(5, seed=0, beam_width=1)
    assert margin_of(rows, [0.0, -0.5], two) == pytest.approx(0.1)  # -1, -1.9 | -2, -3.5
    assert margin_of(rows, [0.0, -0.5], one) == pytest.approx(0.9)  # -1 | -1.9
    assert margin_of(rows, [0.0, -0.5], replace(one, stop_token_ids=(1,))) == pytest.approx(0.1)  # goes on: -1.9 | -2


# ---- a judge that lets everything pass proves nothing ----


def delivered(judge: Judge, text: Text, **sampling: object) -> Delivered:
    """Six tokens, as they are alone."""
    params = SamplingParams(6, seed=5, **sampling)  # type: ignore[arg-type]
    request = Request("0", "", "model", text.token_ids[:40], b"", params, (Branch(0),))
    tokens, reason = judge.alone(request)[0]
    return Delivered(request, 0, list(tokens), 0, reason)


def verdicts(judge: Judge, each: Delivered) -> set[Verdict]:
    followed = judge.follow(each.request.prompt_token_ids, [each])
    return {next(iter(followed)).verdict, judge.compare_with_alone(each).verdict}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_changed_output_is_noticed(judge: Judge, text: Text, temperature: float) -> None:
    right = delivered(judge, text, temperature=temperature, top_k=20)
    assert verdicts(judge, right) == {Verdict.EQUAL}
    for at in range(6):
        other = [*right.token_ids[:at], text.token_ids[700], *right.token_ids[at + 1 :]]
        assert verdicts(judge, replace(right, token_ids=other)) == {Verdict.WRONG}
    assert verdicts(judge, replace(right, token_ids=right.token_ids[:-1])) == {Verdict.WRONG}
    assert verdicts(judge, replace(right, token_ids=[*right.token_ids, 1])) == {Verdict.WRONG}
    assert verdicts(judge, replace(right, reason=FinishReason.STOP)) == {Verdict.WRONG}


def test_what_was_delivered_before_an_abort_is_the_beginning_of_the_output(judge: Judge, text: Text) -> None:
    right = delivered(judge, text)
    begun = replace(right, token_ids=right.token_ids[:3], reason=FinishReason.ABORT)
    assert verdicts(judge, begun) == {Verdict.EQUAL}
    assert verdicts(judge, replace(begun, token_ids=right.token_ids[1:4])) == {Verdict.WRONG}


def test_another_result_of_a_beam_search_is_noticed(judge: Judge, text: Text) -> None:
    right = delivered(judge, text, beam_width=3)
    assert judge.compare_with_alone(right).verdict is Verdict.EQUAL
    other = [*right.token_ids[:-1], text.token_ids[700]]
    assert judge.compare_with_alone(replace(right, token_ids=other)).verdict is Verdict.WRONG
    assert judge.compare_with_alone(replace(right, reason=FinishReason.STOP)).verdict is Verdict.WRONG


def test_the_best_score_of_a_search_is_that_of_what_it_finds_alone(judge: Judge, text: Text) -> None:
    found = delivered(judge, text, beam_width=3, length_penalty=2.0)
    prompt, sampling = found.request.prompt_token_ids, found.request.sampling
    margin, scores = judge.search(prompt, sampling, count=1)
    assert margin > NEAR_TIE
    assert scores == [pytest.approx(judge.score(prompt, sampling, tuple(found.token_ids)), abs=NEAR_TIE)]
