"""Log-probabilities: as many as were asked for, of the tokens that they stand beside, and valid JSON."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from api_calls import chat, complete
from serve_process import OneModel

pytestmark = pytest.mark.usefixtures("canary")

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@pytest.mark.parametrize(("top_logprobs", "count"), [(None, 0), (0, 0), (1, 1), (5, 5), (20, 20)])
def test_case_bug_037_alternatives(cluster: OneModel, stream: bool, top_logprobs: int | None, count: int) -> None:
    answer = chat(cluster, "Say hello", logprobs=True, top_logprobs=top_logprobs, stream=stream, **GREEDY)
    (choice,) = answer.choices
    assert "".join(entry["token"] for entry in choice.logprobs) == choice.text
    for entry in choice.logprobs:
        top = entry["top_logprobs"]
        assert len(top) == count
        values = [each["logprob"] for each in top]
        assert values == sorted(values, reverse=True)
        assert bytes(entry["bytes"]).decode() == entry["token"]
        if top:
            assert (top[0]["token"], top[0]["logprob"]) == (entry["token"], entry["logprob"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 5}, "top_logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
    ],
)
def test_case_bug_037_wrong_numbers(cluster: OneModel, fields: dict[str, Any], param: str, stream: bool) -> None:
    answer = chat(cluster, "Say hello", stream=stream, **fields, **GREEDY)
    assert (answer.status, (answer.error or {})["param"]) == (400, param)


@pytest.mark.parametrize("count", [0, 5, 6])
def test_case_bug_037_completions(cluster: OneModel, stream: bool, count: int) -> None:
    answer = complete(cluster, "The capital of France is", logprobs=count, stream=stream, **GREEDY)
    (choice,) = answer.choices
    assert "".join(token for token, *_ in choice.logprobs) == choice.text
    offset = 0
    for token, value, top, at in choice.logprobs:
        assert value <= 0
        assert at == offset
        offset += len(token)
        assert len(top or {}) in (count, count + 1)
        assert count == 0 or top[token] == value


def test_case_bug_037_true_is_no_number(cluster: OneModel) -> None:
    answer = complete(cluster, "a", logprobs=True, **GREEDY)
    assert (answer.status, (answer.error or {})["param"]) == (400, "logprobs")


def finite(value: Any) -> bool:
    """No number in the answer is infinite or none; JSON that could not say so would not have been read."""
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def test_case_bug_039_tokens_without_probability(cluster: OneModel, stream: bool) -> None:
    prompt = "correct horse"
    answers = [
        complete(cluster, prompt, echo=True, logprobs=5, temperature=1, top_k=1, max_tokens=3, stream=stream),
        complete(cluster, prompt, allowed_token_ids=[260, 261], logprobs=5, max_tokens=3, stream=stream),
        chat(
            cluster,
            "Give me JSON",
            response_format={"type": "json_object"},
            logprobs=True,
            top_logprobs=20,
            max_tokens=12,
            stream=stream,
        ),
    ]
    for answer in answers:
        assert answer.status == 200
        (choice,) = answer.choices
        assert choice.logprobs
        assert finite(choice.logprobs)


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 33, 160])
def test_case_bug_041_prompts_in_the_cache(cluster: OneModel, num_tokens: int) -> None:
    """Cold, warm, and beside a prompt that shares its first blocks."""
    prompt = [1_000 + (7 * number + num_tokens) % 900 for number in range(num_tokens)]
    other = prompt[:32] + [5_000 + number for number in range(20)]

    def scores(token_ids: list[int]) -> list[float]:
        answer = complete(cluster, token_ids, echo=True, logprobs=1, max_tokens=0)
        values = [value for _, value, *_ in answer.choices[0].logprobs]
        assert values[0] is None
        assert len(values) == len(token_ids)
        return values[1:]

    complete(cluster, prompt, max_tokens=1)
    first = scores(prompt)
    with ThreadPoolExecutor(2) as threads:
        others = threads.submit(scores, other)
        again = threads.submit(scores, prompt)
        assert again.result() == pytest.approx(first, abs=1e-3)
        assert others.result()[: min(num_tokens, 32) - 1] == pytest.approx(first[: min(num_tokens, 32) - 1], abs=1e-3)
    answer = complete(cluster, prompt, prompt_logprobs=0, max_tokens=1)
    assert answer.status == 200


def test_case_bug_043_several_tokens_in_a_chunk(cluster: OneModel) -> None:
    fields = GREEDY | {"max_tokens": 24, "logprobs": True, "top_logprobs": 5}
    whole = chat(cluster, "Tell me of the sea", **fields).choices[0]
    streamed = chat(cluster, "Tell me of the sea", stream=True, **fields).choices[0]
    assert [entry["token"] for entry in streamed.logprobs] == [entry["token"] for entry in whole.logprobs]
    for one, other in zip(streamed.logprobs, whole.logprobs, strict=True):
        assert one["token"] == one["top_logprobs"][0]["token"]
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
