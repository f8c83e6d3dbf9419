"""Every field is honoured or refused by name, with OpenAI's error body, before the cluster hears of it."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import orjson
import pytest

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    return {"model": "smollm2", "max_tokens": 8, **prompt, **fields}


async def refused(client: httpx2.AsyncClient, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """Post ``body`` (JSON as bytes, or an object), check the form of the error, give its content."""
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    answer = await client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(answer.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.fixture(autouse=True)
async def canary(client: httpx2.AsyncClient, service: Any) -> Any:
    """Nothing refused reaches the cluster, and the next request is served."""
    yield
    served = len(service.requests)
    answer = await client.post(CHAT, json=body_of(CHAT, {}))
    assert answer.status_code == 200
    assert len(service.requests) == served + 1


WRONG_FIELDS = [
    ("BUG-001", {"logit_bias": {"AI": -100}}, "logit_bias"),
    ("BUG-001", {"logit_bias": {"5": "x"}}, "logit_bias"),
    ("BUG-001", {"logit_bias": []}, "logit_bias"),
    ("BUG-003", {"stop_token_ids": [151_645], "min_tokens": 5}, "stop_token_ids"),
    ("BUG-003", {"stop_token_ids": [49_152]}, "stop_token_ids"),
    ("BUG-003", {"stop_token_ids": [-1]}, "stop_token_ids"),
    ("BUG-003", {"stop_token_ids": [10**30]}, "stop_token_ids[0]"),
    ("BUG-007", {"top_k": 0.01}, "top_k"),
    ("BUG-007", {"top_k": True}, "top_k"),
    ("BUG-007", {"top_k": -2}, "top_k"),
    ("BUG-007", {"temperature": "hot"}, "temperature"),
    ("BUG-007", {"top_p": "1"}, "top_p"),
    ("BUG-007", {"n": "two"}, "n"),
    ("BUG-007", {"stream": "yes"}, "stream"),
    ("BUG-007", {"stream": 1}, "stream"),
    ("BUG-007", {"max_tokens": "5"}, "max_tokens"),
    ("BUG-007", {"max_tokens": 3.7}, "max_tokens"),
    ("BUG-007", {"stop": 5}, "stop"),
    ("BUG-007", {"stop": [1]}, "stop[0]"),
    ("BUG-009", {"temperature": -0.1}, "temperature"),
    ("BUG-009", {"temperature": 2.5}, "temperature"),
    ("BUG-009", {"top_p": 0}, "top_p"),
    ("BUG-009", {"top_p": 1.1}, "top_p"),
    ("BUG-009", {"min_p": 2}, "min_p"),
    ("BUG-009", {"presence_penalty": -2.1}, "presence_penalty"),
    ("BUG-009", {"repetition_penalty": 0}, "repetition_penalty"),
    ("BUG-011", {"max_tokens": 0}, "max_tokens"),
    ("BUG-011", {"max_tokens": -1}, "max_tokens"),
    ("BUG-021", {"allowed_token_ids": []}, "allowed_token_ids"),
    ("BUG-021", {"allowed_token_ids": [49_152]}, "allowed_token_ids"),
    ("BUG-021", {"allowed_token_ids": [253], "bad_words": [" a"]}, "allowed_token_ids"),
    ("BUG-021", {"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids"),
    ("BUG-021", {"bad_words": [""]}, "bad_words[0]"),
    ("BUG-001", {"logit_bias": {"49152": 1}}, "logit_bias"),
    ("BUG-001", {"logit_bias": {"5": 100.5}}, "logit_bias"),
    ("BUG-001", {"logit_bias": {"5": True}}, "logit_bias"),
    ("BUG-001", {"logit_bias": {"-5": 1}}, "logit_bias"),
    ("", {"frequency_penalty": 2.1}, "frequency_penalty"),
    ("", {"repetition_penalty": 101}, "repetition_penalty"),
    ("", {"repetition_penalty": 5e-324}, "repetition_penalty"),
    ("BUG-037", {"prompt_logprobs": 21}, "prompt_logprobs"),
    ("BUG-037", {"prompt_logprobs": -1}, "prompt_logprobs"),
    ("", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("BUG-023", {"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ("BUG-023", {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ("", {"n": 0}, "n"),
    ("", {"n": 129}, "n"),
    ("BUG-007", {"n": True}, "n"),
    ("BUG-007", {"cache_prompt": "no"}, "cache_prompt"),
    ("BUG-007", {"beam_width": 2.0}, "beam_width"),
    ("BUG-007", {"use_beam_search": 1}, "use_beam_search"),
    ("", {"seed": 1.5}, "seed"),
    ("", {"seed": 2**63}, "seed"),
    ("", {"stop": ""}, "stop"),
    ("", {"stop": ["a", ""]}, "stop[1]"),
    ("", {"stop": ["a"] * 17}, "stop"),
    ("", {"stop": "a" * 1001}, "stop"),
    ("", {"min_tokens": 9}, "min_tokens"),
    ("", {"timeout": 0}, "timeout"),
    ("", {"cache_salt": ""}, "cache_salt"),
    ("", {"priority": 2**70}, "priority"),
    ("", {"store": True}, "store"),
    ("", {"metadata": {"a": "b"}}, "metadata"),
    ("", {"service_tier": "flex"}, "service_tier"),
    ("", {"best_off": 1}, "best_off"),
    ("", {"model": None}, "model"),
    ("", {"model": 5}, "model"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param(fields, param, id=f"{case} {param} {index}".strip())
        for index, (case, fields, param) in enumerate(WRONG_FIELDS)
    ],
)
async def test_a_wrong_field_is_named(
    client: httpx2.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    error = await refused(client, path, json.dumps(body_of(path, fields)).encode())
    assert error["param"] == param
    assert param.split(".")[-1] in error["message"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "seed"])
async def test_case_bug_009_numbers_that_are_no_json(client: httpx2.AsyncClient, field: str, value: str) -> None:
    error = await refused(client, CHAT, orjson.dumps(body_of(CHAT, {}))[:-1] + f',"{field}":{value}}}'.encode())
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"top_logprobs": 5}, "top_logprobs", id="BUG-037 without logprobs"),
        pytest.param({"top_logprobs": 5, "logprobs": False}, "top_logprobs", id="BUG-037 with logprobs false"),
        pytest.param({"top_logprobs": 21, "logprobs": True}, "top_logprobs", id="BUG-037 too many"),
        pytest.param({"top_logprobs": -1, "logprobs": True}, "top_logprobs", id="BUG-037 negative"),
        ({"logprobs": 5}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        pytest.param({"tool_choice": "required"}, "tool_choice", id="BUG-063 no tools"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template": "{% for a in range(99999) %}x{% endfor %}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x", "tokenize": True}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
        ({"prompt": "x"}, "prompt"),
    ],
)
async def test_wrong_fields_of_chats(client: httpx2.AsyncClient, fields: dict[str, Any], param: str) -> None:
    assert (await refused(client, CHAT, body_of(CHAT, fields)))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"prompt": ""}, "prompt", id="BUG-005 empty text"),
        pytest.param({"prompt": [""]}, "prompt", id="BUG-005 list of an empty text"),
        pytest.param({"prompt": []}, "prompt", id="BUG-005 empty list"),
        pytest.param({"prompt": [[]]}, "prompt[0]", id="BUG-005 empty list of ids"),
        pytest.param({"prompt": ["ok", ""]}, "prompt", id="BUG-005 one of two is empty"),
        pytest.param({"prompt": None}, "prompt", id="BUG-007 null"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [49_152]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[5], ["a"]]}, "prompt[1][0]"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        pytest.param({"logprobs": 21}, "logprobs", id="BUG-037 too many"),
        pytest.param({"logprobs": True}, "logprobs", id="BUG-037 true"),
        pytest.param({"echo": 1}, "echo", id="BUG-011 no boolean"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"messages": MESSAGES}, "messages"),
        pytest.param({"prompt": [5] * 1600, "n": 128, "prompt_logprobs": 20}, "prompt", id="4.3 M log-probabilities"),
    ],
)
async def test_wrong_fields_of_completions(client: httpx2.AsyncClient, fields: dict[str, Any], param: str) -> None:
    assert (await refused(client, COMPLETION, body_of(COMPLETION, fields)))["param"] == param


NEUTRAL: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "echo": False,
    "store": False,
    "metadata": {},
    "service_tier": "auto",
    "use_beam_search": False,
    "length_penalty": 1,
    "early_stopping": False,
    "skip_special_tokens": True,
    "stop": [],
    "user": "me",
}
NEUTRAL_CHAT: dict[str, Any] = {
    "logprobs": False,
    "top_logprobs": 0,
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "reasoning_effort": "none",
    "modalities": ["text"],
    "chat_template_kwargs": {},
    "add_generation_prompt": True,
}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_values_that_change_nothing_are_accepted(client: httpx2.AsyncClient, path: str) -> None:
    fields = NEUTRAL | (NEUTRAL_CHAT if path == CHAT else {"best_of": 1, "suffix": None})
    answer = await client.post(path, json=body_of(path, fields))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_null_is_the_same_as_nothing(client: httpx2.AsyncClient, path: str) -> None:
    document = (await client.get("/openapi.json")).json()
    content = document["paths"][path]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    fields = document["components"]["schemas"][name]["properties"]
    body = dict.fromkeys(fields.keys() - {"model", "messages", "prompt"}) | {"model": "smollm2"}
    body |= {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text


async def test_case_bug_017_the_users_text_is_in_no_param(client: httpx2.AsyncClient) -> None:
    error = await refused(client, CHAT, body_of(CHAT, {"messages": {"role": "user", "content": "secret words"}}))
    assert error["param"] == "messages"
    assert "secret" not in str(error)


async def test_case_bug_017_unknown_model(client: httpx2.AsyncClient) -> None:
    error = await refused(client, CHAT, body_of(CHAT, {"model": "does-not-exist"}), 404)
    assert error["code"] == "model_not_found"
    answer = await client.get("/v1/models/does-not-exist")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_case_bug_017_unknown_path_and_method(client: httpx2.AsyncClient) -> None:
    error = await refused(client, "/v1/responses", {}, 404)
    assert error["message"] == (
        "Unknown URL: POST /v1/responses. There are /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models; "
        "/docs describes them all."
    )
    await refused(client, f"{CHAT}/", body_of(CHAT, {}), 404)  # behind TLS, a redirection would lead to plain HTTP
    answer = await client.get(CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "body",
    [b"", b"hello", b"{", b"{'a': 1}", b'{"model":"\xff"}', b'{"model":"\\ud800"}', b"[" * 10_000 + b"]" * 10_000],
    ids=["empty", "text", "cut off", "Python", "no UTF-8", "surrogate", "deep"],
)
async def test_case_bug_017_bodies_that_are_no_json(client: httpx2.AsyncClient, body: bytes) -> None:
    assert (await refused(client, CHAT, body))["code"] == "invalid_json"


@pytest.mark.parametrize("body", [b"null", b"[]", b"5", b'"text"'])
async def test_json_that_is_no_object(client: httpx2.AsyncClient, body: bytes) -> None:
    await refused(client, CHAT, body)


async def test_case_bug_017_wrong_content_type(client: httpx2.AsyncClient) -> None:
    answer = await client.post(CHAT, data={"model": "smollm2"})
    assert answer.status_code == 415
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("announced", [True, False])
async def test_huge_bodies(client: httpx2.AsyncClient, announced: bool) -> None:
    async def parts() -> Any:
        for _ in range(33):
            yield b" " * 2**20

    content = b" " * (33 * 2**20) if announced else parts()
    answer = await client.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert "33554432 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "num_output"),
    [(255, 1, 1), (255, None, 1), (254, 2, 2), (254, None, 2), (255, 2, None), (256, 1, None), (256, None, None)],
)
async def test_case_bug_081_at_the_end_of_the_context(
    client: httpx2.AsyncClient, service: Any, num_prompt_tokens: int, max_tokens: int | None, num_output: int | None
) -> None:
    """The context holds 256 tokens. ``num_output`` None: refused with both numbers."""
    body = body_of(COMPLETION, {"prompt": [500] * num_prompt_tokens, "max_tokens": max_tokens})
    if num_output is not None:
        answer = (await client.post(COMPLETION, json=body)).json()
        assert service.requests[-1].sampling.max_tokens == num_output
        assert answer["usage"]["completion_tokens"] == num_output
        assert answer["choices"][0]["finish_reason"] == "length"
        return
    error = await refused(client, COMPLETION, body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "maximum context length is 256 tokens" in error["message"]
    assert f"{num_prompt_tokens} in the prompt" in error["message"]


LONG = "word " * 100_000


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (COMPLETION, {"prompt": ["hi", LONG]}, "prompt"),
        ("/v1/embeddings", {"input": LONG}, "input"),
    ],
)
async def test_case_bug_081_a_text_that_no_tokenization_makes_short_enough(
    client: httpx2.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    error = await refused(client, path, {"model": "smollm2", **fields})
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "256 tokens" in error["message"]
