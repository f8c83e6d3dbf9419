"""Preempted requests on the real model, in a pool for about one and a half of them: nothing of an output changes."""

from __future__ import annotations

import pytest
from judge import Judge, Verdict
from lab import Lab, Session, Setup
from random_requests import Text

from octavo.worker.messages import Branch, FinishReason, Request, SamplingParams
from octavo.worker.routing_hash import pack_hashes

Tokens = tuple[int, ...]


def requests(
    text: Text, lab: Lab, sampling: SamplingParams, lengths: list[int], num_branches: int = 1
) -> list[Request]:
    """Their prompts have nothing in common."""
    prompts = [text.token_ids[180 * index : 180 * index + length] for index, length in enumerate(lengths)]
    branches = tuple(Branch(index) for index in range(num_branches))
    return [
        Request(str(i), "", "model", prompt, pack_hashes(lab.hasher.hash_blocks(prompt)), sampling, branches)
        for i, prompt in enumerate(prompts)
    ]


def assert_as_alone(judge: Judge, all_requests: list[Request], session: Session) -> None:
    """Every output is followed token by token; the last request is also run truly alone."""
    for request in all_requests:
        outputs = [session.delivered[request.request_id, branch.index] for branch in request.branches]
        judgements = list(judge.follow(request.prompt_token_ids, outputs))
        if request is all_requests[-1]:
            judgements += [judge.compare_with_alone(output) for output in outputs]
        assert not [judgement.why for judgement in judgements if judgement.verdict is Verdict.WRONG]


@pytest.mark.parametrize("plans_ahead", [True, False])
def test_a_preempted_request_loses_and_repeats_no_token(lab: Lab, judge: Judge, text: Text, plans_ahead: bool) -> None:
    """Case BUG-073: short and long prompts, greedy, without a stop token."""
    sampling = SamplingParams(max_tokens=24, seed=0, temperature=0.0)
    all_requests = requests(text, lab, sampling, [3, 3, 3, 120, 120, 120])
    with lab.session(Setup(num_blocks=13, async_scheduling=plans_ahead)) as session:
        for request in all_requests:
            session.submit(request)
        session.run()
    assert session.engine.scheduler.counters.num_preemptions > 0
    assert session.engine.counters.num_generation_tokens == 6 * 24
    for each in session.delivered.values():
        assert (len(each.token_ids), each.reason) == (24, FinishReason.LENGTH)
    assert_as_alone(judge, all_requests, session)


def test_what_was_generated_does_not_become_prompt(lab: Lab, judge: Judge, text: Text) -> None:
    """Case BUG-075: min_tokens, stop tokens and branches count from the prompt's end; nothing is said to be cached that
    only this request had computed."""
    sampling = SamplingParams(
        max_tokens=40, seed=11, temperature=0.8, top_k=8, min_tokens=14, stop_token_ids=text.frequent
    )
    all_requests = requests(text, lab, sampling, [20, 60] * 3, num_branches=2)
    with lab.session(Setup(num_blocks=11, async_scheduling=True)) as session:
        for request in all_requests:
            session.submit(request)
        session.run()
    engine, outputs = session.engine, session.delivered
    assert engine.scheduler.counters.num_preemptions > 0
    assert {each.reason for each in outputs.values()} == {FinishReason.STOP}
    assert all(len(each.token_ids) > 14 for each in outputs.values())
    assert {each.num_cached_tokens for each in outputs.values()} == {0}
    assert_as_alone(judge, all_requests, session)
    progress = {each.request_id: each for each in engine.drain_progress()}
    for request in all_requests:
        num_tokens = sum(len(outputs[request.request_id, index].token_ids) for index in (0, 1))
        assert progress[request.request_id].num_output_tokens == num_tokens
        assert progress[request.request_id].num_cached_tokens == 0
    assert engine.counters.num_prompt_tokens == sum(len(request.prompt_token_ids) for request in all_requests)
    assert engine.counters.num_generation_tokens == sum(len(each.token_ids) for each in outputs.values())
