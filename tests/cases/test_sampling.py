"""What sampling parameters do to the text, alone and beside others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from api_calls import chat, complete
from serve_process import OneModel

pytestmark = pytest.mark.usefixtures("canary")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logit_bias": {"28": -100, "30": -100}},
        {"response_format": {"type": "json_object"}},
    ],
    ids=["plain", "biased", "json"],
)
def test_case_bug_045_tiny_temperatures(cluster: OneModel, stream: bool, more: dict[str, Any]) -> None:
    fields = {"prompt": "San Francisco is a", "max_tokens": 7, "seed": 1, "stream": stream} | more
    greedy = complete(cluster, temperature=0, **fields).text
    assert greedy.strip()
    for temperature in (1e-9, 1e-6, 1e-5, 1e-4):
        assert complete(cluster, temperature=temperature, **fields).text == greedy
    for temperature in (1e-3, 1e-2):
        assert complete(cluster, temperature=temperature, **fields).text.strip()


@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 1.8}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}],
    ids=lambda penalty: next(iter(penalty)),
)
def test_case_bug_047_penalties(cluster: OneModel, stream: bool, penalty: dict[str, float]) -> None:
    """Cold, with the prompt cached, and in a batch of eight: the same tokens, which are those that the penalty leaves.
    The expected tokens are worked out from the model's own log-probabilities, step by step."""
    prompt = "Paris Paris Paris Paris"
    fields = {"max_tokens": 12, "temperature": 0, "stream": stream} | penalty
    texts = {complete(cluster, prompt, **fields).text for _ in range(2)}
    others = [{"presence_penalty": 1.0}, {"top_k": 5, "temperature": 1.0}, {"logit_bias": {"5": 3}}, {}] * 2
    with ThreadPoolExecutor(9) as threads:
        beside = [
            threads.submit(complete, cluster, f"{number} {prompt}", max_tokens=12, **other)
            for number, other in enumerate(others)
        ]
        texts.add(threads.submit(complete, cluster, prompt, **fields).result().text)
        assert all(each.result().status == 200 for each in beside)
    assert texts == {expected_text(cluster, prompt, penalty, 12)}


def expected_text(cluster: OneModel, prompt: str, penalty: dict[str, float], num_tokens: int) -> str:
    """Greedy under the penalty, from the 20 likeliest tokens of each position. Log-probabilities differ from logits by
    one number for each position, which repetition's division does not allow for: for it the logits are not known, and
    the text itself is checked to avoid what came before."""
    if "repetition_penalty" in penalty:
        text = complete(cluster, prompt, max_tokens=num_tokens, temperature=0, **penalty).text
        assert "Paris" not in text
        return text
    tokens: list[str] = []
    for _ in range(num_tokens):
        answer = complete(cluster, prompt + "".join(tokens), max_tokens=1, temperature=0, logprobs=20)
        ((_, _, top, _),) = answer.choices[0].logprobs
        lowered = {
            token: value
            - penalty.get("presence_penalty", 0.0) * (token in tokens)
            - penalty.get("frequency_penalty", 0.0) * tokens.count(token)
            for token, value in top.items()
        }
        tokens.append(max(lowered, key=lambda token: lowered[token]))
    return "".join(tokens)


def test_case_bug_049_ignore_eos(cluster: OneModel, stream: bool) -> None:
    """EOS ids of the model's files do not end it; the request's own stop tokens do."""
    fields = {"max_tokens": 80, "temperature": 0, "ignore_eos": True, "stream": stream}
    answer = chat(cluster, "Say hello", **fields)
    assert answer.usage is not None
    assert (answer.usage["completion_tokens"], answer.finish_reason) == (80, "length")
    stopped = chat(cluster, "Say hello", stop_token_ids=[2], **fields)
    assert stopped.finish_reason == "stop"


def test_case_bug_051_choices_of_one_seed(cluster: OneModel, stream: bool) -> None:
    fields = {"prompt": "Once", "seed": 7, "temperature": 1, "max_tokens": 20, "stream": stream}

    def texts(**more: Any) -> list[str]:
        return [choice.text for choice in complete(cluster, **(fields | more)).choices]

    first = texts(n=4)
    assert len(set(first)) == 4
    assert [texts(n=4) for _ in range(2)] == [first] * 2
    assert texts(n=1) == first[:1]
    assert len(set(texts(n=4, temperature=0))) == 1
    with ThreadPoolExecutor(4) as threads:
        load = [threads.submit(complete, cluster, f"Load {number}", max_tokens=40) for number in range(4)]
        assert texts(n=4) == first
        assert all(each.result().status == 200 for each in load)


# ---- the model's own defaults ----

PROMPT = "Paris Paris Paris Paris"


def test_case_bug_053_defaults_hold_where_nothing_is_said(base: OneModel, cluster: OneModel) -> None:
    assert any("temperature 0.6" in line and "top_k 1" in line for line in base.lines)
    silent = complete(base, PROMPT, max_tokens=12)
    assert silent.text == complete(cluster, PROMPT, max_tokens=12, temperature=0, repetition_penalty=1.2).text
    said = {"temperature": 1, "top_k": -1, "top_p": 1, "repetition_penalty": 1, "seed": 3}
    one, other = (complete(server, PROMPT, max_tokens=12, **said).text for server in (base, cluster))
    assert one == other
    uncapped = complete(base, PROMPT, max_tokens=None, stop=["\n\n\n\n"], ignore_eos=True, timeout=2)
    assert (uncapped.usage or {})["completion_tokens"] > 5


def test_case_bug_053_defaults_can_be_switched_off(plain: OneModel, cluster: OneModel) -> None:
    assert not any("top_k 1" in line for line in plain.lines)
    one, other = (complete(each, PROMPT, max_tokens=12, seed=3).text for each in (plain, cluster))
    assert one == other
