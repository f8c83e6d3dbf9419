"""Greedy outputs of the real model with the prompt in the cache: none, some or all of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from judge import Judge, Verdict
from lab import BLOCK_SIZE, Delivered, Lab, Session, Setup
from random_requests import Text

from octavo.worker.messages import Request, SamplingParams
from octavo.worker.routing_hash import pack_hashes

MAX_TOKENS = 4
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def session(lab: Lab) -> Iterator[Session]:
    with lab.session(Setup(num_blocks=160, max_num_seqs=12, async_scheduling=True)) as session:
        yield session


def ask(lab: Lab, session: Session, *prompts: Tokens) -> list[Delivered]:
    """All at once."""
    names = [str(len(session.delivered) + index) for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        hashes = pack_hashes(lab.hasher.hash_blocks(prompt))
        session.submit(Request(name, "", "model", prompt, hashes, SamplingParams(MAX_TOKENS, seed=0, temperature=0.0)))
    session.run()
    return [session.delivered[name, 0] for name in names]


def assert_right(judge: Judge, each: Delivered) -> None:
    judgement = next(iter(judge.follow(each.request.prompt_token_ids, [each])))
    assert judgement.verdict is not Verdict.WRONG, judgement.why


@pytest.mark.parametrize(("length", "begin"), [(16, 0), (32, 300), (160, 600)])
def test_a_prompt_that_is_cached_to_its_end(
    lab: Lab, judge: Judge, text: Text, session: Session, length: int, begin: int
) -> None:
    """Case BUG-067: one token is computed again, in a block of its own; a longer prompt still finds all blocks."""
    prompt = text.token_ids[begin : begin + length]
    cold, warm, again = (ask(lab, session, prompt)[0] for _ in range(3))
    longer, shorter = (
        ask(lab, session, other)[0] for other in (text.token_ids[begin : begin + length + 1], prompt[:-1])
    )
    at_once = ask(lab, session, *[prompt] * 8)
    cached = [each.num_cached_tokens for each in (cold, warm, again, longer, shorter, *at_once)]
    assert cached == [0, length - 1, length - 1, length, length - BLOCK_SIZE, *[length - 1] * 8]
    assert warm.token_ids == again.token_ids
    for each in (cold, warm, longer, shorter, *at_once):
        assert_right(judge, each)


def test_chained_prefixes_give_the_same_cold_and_warm(lab: Lab, judge: Judge, text: Text, session: Session) -> None:
    """Case BUG-071: each prompt goes on 20 tokens after the one before it; the cache changes nothing."""
    prompts = [text.token_ids[800 : 800 + length] for length in range(20, 260, 20)]
    cold = [ask(lab, session, prompt)[0] for prompt in prompts]
    warm = [ask(lab, session, *prompts) for _ in range(3)]
    lengths = [len(prompt) for prompt in prompts]
    assert [each.num_cached_tokens for each in cold] == [(n - 20) // BLOCK_SIZE * BLOCK_SIZE for n in lengths]
    for asked in warm:
        found = [n // BLOCK_SIZE * BLOCK_SIZE for n in lengths]
        assert [each.num_cached_tokens for each in asked] == [
            min(f, n - 1) for f, n in zip(found, lengths, strict=True)
        ]
        assert [each.token_ids for each in asked] == [each.token_ids for each in warm[0]]
    for each in (*cold, *warm[0]):
        judgement = judge.compare_with_alone(each)
        assert judgement.verdict is not Verdict.WRONG, judgement.why
