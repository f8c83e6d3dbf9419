"""Bad requests are refused by name, with OpenAI's error body, before any work, and disturb nobody."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import openai
import pytest
from api_calls import CHAT, COMPLETION, Answer, call, chat, complete
from openai import OpenAI
from serve_process import OneModel

pytestmark = pytest.mark.usefixtures("canary")


def refused(answer: Answer, param: str | None, status: int = 400) -> str:
    """The message of an error in OpenAI's form."""
    assert answer.status == status, answer
    assert answer.error is not None
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert (answer.error["type"], answer.error["param"]) == ("invalid_request_error", param)
    return str(answer.error["message"])


@pytest.mark.parametrize("bias", [{"AI": -100}, {"5": 101}, {"5": -100.5}, {"5": "1"}, {"5": True}, {"-1": 1}, [5]])
def test_case_bug_001_logit_bias(cluster: OneModel, stream: bool, bias: Any) -> None:
    assert "logit_bias" in refused(chat(cluster, "hi", max_tokens=8, logit_bias=bias, stream=stream), "logit_bias")


def test_case_bug_003_stop_tokens_beyond_the_vocabulary(cluster: OneModel, stream: bool) -> None:
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    alone = complete(cluster, "A neighbour says", **fields).text
    with ThreadPoolExecutor(1) as threads:
        beside = threads.submit(complete, cluster, "A neighbour says", **fields)
        for token_id in (151_645, 49_152, -1):
            answer = chat(cluster, "hi", min_tokens=5, max_tokens=10, stop_token_ids=[token_id], stream=stream)
            refused(answer, "stop_token_ids")
        assert beside.result().text == alone


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["ok", ""]], ids=json.dumps)
def test_case_bug_005_empty_prompts(cluster: OneModel, stream: bool, prompt: Any) -> None:
    answer = complete(cluster, prompt, max_tokens=4, stream=stream)
    assert answer.status == 400
    assert answer.error is not None
    assert answer.error["param"].startswith("prompt")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 0.01),
        ("temperature", "hot"),
        ("top_p", "1"),
        ("n", "two"),
        ("stream", "yes"),
        ("max_tokens", "5"),
        ("max_tokens", 3.7),
        ("stop", 5),
        ("prompt", None),
    ],
)
def test_case_bug_007_wrong_types(cluster: OneModel, field: str, value: Any) -> None:
    refused(complete(cluster, **({"prompt": "a", "max_tokens": 2} | {field: value})), field)


def test_case_bug_007_wrong_types_within(cluster: OneModel, stream: bool) -> None:
    refused(complete(cluster, "a", stop=[1], stream=stream), "stop[0]")
    refused(call(cluster, CHAT, {"messages": {}}, stream=stream), "messages")


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_case_bug_009_numbers_that_are_none(cluster: OneModel, field: str, number: str) -> None:
    body = f'{{"model": "{cluster.model}", "prompt": "a", "max_tokens": 2, "{field}": {number}}}'
    assert call(cluster, COMPLETION, body.encode()).status == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("presence_penalty", 2.5),
        ("repetition_penalty", 0),
    ],
)
def test_case_bug_009_numbers_out_of_range(cluster: OneModel, stream: bool, field: str, value: float) -> None:
    assert field in refused(complete(cluster, "a", max_tokens=2, stream=stream, **{field: value}), field)


def test_case_bug_011_scoring(cluster: OneModel, stream: bool) -> None:
    prompt = "The answer: Yes"
    answer = complete(cluster, prompt, max_tokens=0, echo=True, logprobs=1, stream=stream)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (prompt, "length")
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 0
    tokens = [token for token, *_ in choice.logprobs]
    values = [value for _, value, *_ in choice.logprobs]
    assert "".join(tokens) == prompt
    assert len(tokens) == answer.usage["prompt_tokens"]
    assert values[0] is None
    assert all(value < 0 for value in values[1:])


def test_case_bug_011_nothing_to_do(cluster: OneModel, stream: bool) -> None:
    refused(complete(cluster, "The answer: Yes", max_tokens=0, stream=stream), "max_tokens")
    refused(complete(cluster, "The answer: Yes", max_tokens=-1, echo=True, stream=stream), "max_tokens")


def test_case_bug_013_one_request_id_for_two(cluster: OneModel) -> None:
    """Two streams at a time, through two gateways; one of them is left in its middle."""
    fields = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    prompts = ["The first of them is", "Another one begins with"]
    alone = [complete(cluster, prompt, **fields).text for prompt in prompts]
    headers = {"x-request-id": "same"}

    def run(prompt: str) -> str:
        return call(cluster, COMPLETION, {"prompt": prompt} | fields, stream=True, headers=headers).text

    def leave(prompt: str) -> None:
        body = {"model": cluster.model, "prompt": prompt, "stream": True} | fields
        url = f"{cluster.url}{COMPLETION}"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
            next(response.iter_lines())

    with ThreadPoolExecutor(3) as threads:
        for _ in range(6):
            runs = [threads.submit(run, prompt) for prompt in prompts]
            threads.submit(leave, prompts[0]).result()
            assert [each.result() for each in runs] == alone
    huge = httpx.get(f"{cluster.url}/health", headers={"x-request-id": "x" * 2**20}, timeout=60)
    assert 400 <= huge.status_code < 500
    assert all(cluster.gauge(name) >= 0 for name in ("octavo_num_requests_running", "octavo_num_requests_waiting"))


def test_case_bug_015_max_completion_tokens(cluster: OneModel, stream: bool) -> None:
    for fields in ({}, {"max_tokens": 10}):
        answer = chat(cluster, "Count from 1 to 50", max_completion_tokens=3, temperature=0, stream=stream, **fields)
        assert answer.usage is not None
        assert (answer.usage["completion_tokens"], answer.finish_reason) == (3, "length")


def test_case_bug_017_errors_as_the_openai_client_knows_them(client: OpenAI, cluster: OneModel) -> None:
    secret = "my own words"
    refused_error = refused(call(cluster, CHAT, {"messages": {"role": "user", "content": secret}}), "messages")
    assert secret not in refused_error
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="does-not-exist", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("does-not-exist")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=cluster.model, prompt="a", temperature=9)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    refused(call(cluster, CHAT, b"{not json"), None)
    refused(call(cluster, CHAT, b"{}", headers={"content-type": "text/plain"}), None, status=415)
    refused(call(cluster, "/v1/nope", {}), None, status=404)


HOSTILE = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"


def test_case_bug_019_templates_of_requests(cluster: OneModel, stream: bool) -> None:
    """They are refused, and /health answers meanwhile."""
    slowest = 0.0
    is_over = threading.Event()

    def watch() -> None:
        nonlocal slowest
        while not is_over.wait(0.1):
            began = time.monotonic()
            httpx.get(f"{cluster.url}/health", timeout=10)
            slowest = max(slowest, time.monotonic() - began)

    with ThreadPoolExecutor(1) as threads:
        watching = threads.submit(watch)
        refused(chat(cluster, "hi", chat_template=HOSTILE, stream=stream), "chat_template")
        kwargs = {"chat_template": HOSTILE, "tokenize": True}
        answer = chat(cluster, "hi", chat_template_kwargs=kwargs, stream=stream)
        assert answer.error is not None
        assert answer.error["param"].startswith("chat_template_kwargs")
        time.sleep(0.5)
        is_over.set()
        watching.result()
    assert slowest < 1.0


def test_case_bug_021_nothing_left_to_generate(cluster: OneModel, stream: bool) -> None:
    tokenized = httpx.post(f"{cluster.url}/tokenize", json={"model": cluster.model, "prompt": " a"}).json()
    (token_id,) = tokenized["tokens"]
    fields = {"max_tokens": 4, "temperature": 0, "stream": stream}
    answer = complete(cluster, "This is", allowed_token_ids=[token_id], bad_words=[" a"], **fields)
    refused(answer, "allowed_token_ids")
    refused(complete(cluster, "This is", allowed_token_ids=[], **fields), "allowed_token_ids")
    answer = complete(cluster, "This is", allowed_token_ids=[token_id], logit_bias={str(token_id): -100}, **fields)
    assert answer.text == " a" * 4
