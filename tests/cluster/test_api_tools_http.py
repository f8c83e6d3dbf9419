"""Tools over HTTP: the same calls and finish reasons streamed and not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import openai
import pytest
from one_model import one_model

from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.service import ServedModel, TokenDelta
from octavo.cluster.api.text.processor import TextProcessor
from octavo.worker.messages import FinishReason

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "add"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
FORCED = [{"tool_choice": "required"}, {"tool_choice": NAMED}]


@pytest.fixture
async def client(service: Any, text: TextProcessor, info: ServedModel) -> AsyncIterator[httpx2.AsyncClient]:
    app = build_app(service, one_model(text, dataclasses.replace(info, max_model_len=2048)))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://octavo") as http:
        yield http


async def ask(client: httpx2.AsyncClient, **fields: Any) -> httpx2.Response:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], **fields}
    return await client.post("/v1/chat/completions", json=body)


Answer = tuple[str, list[tuple[str, str]], str]
"""Content, name and arguments of each call, finish reason."""


async def whole(client: httpx2.AsyncClient, **fields: Any) -> Answer:
    (choice,) = (await ask(client, **fields)).json()["choices"]
    message = choice["message"]
    assert message.get("tool_calls") != []
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    return message["content"] or "", calls, choice["finish_reason"]


async def streamed(client: httpx2.AsyncClient, **fields: Any) -> Answer:
    response = await ask(client, stream=True, **fields)
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    calls: dict[int, list[str]] = {}
    for delta in [each for choice in choices for each in choice["delta"].get("tool_calls") or []]:
        is_first = delta["index"] not in calls
        assert is_first == ("id" in delta) == ("name" in delta["function"]) == (delta.get("type") == "function")
        call = calls.setdefault(delta["index"], [delta["function"].get("name"), ""])
        call[1] += delta["function"].get("arguments", "")
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return content, [(name, arguments) for name, arguments in calls.values()], reason


@pytest.mark.parametrize("answer_of", [whole, streamed])
@pytest.mark.parametrize(
    ("choices", "said", "reason", "expected"),
    [
        ([{}, {"tool_choice": "auto"}, *FORCED], CALL, FinishReason.STOP, ("", [("add", '{"a": 1}')], "tool_calls")),
        ([{}], f"I add.\n{CALL}", FinishReason.STOP, ("I add.", [("add", '{"a": 1}')], "tool_calls")),
        ([{}], "I cannot.", FinishReason.STOP, ("I cannot.", [], "stop")),
        ([{"tool_choice": "none"}], CALL, FinishReason.STOP, (CALL, [], "stop")),
        (FORCED, CALL[:45], FinishReason.LENGTH, ("", [("add", '{"a"')], "length")),
        (FORCED, CALL[:20], FinishReason.LENGTH, ("", [], "length")),
        ([{}, *FORCED], f"{CALL}\n{CALL[:20]}", FinishReason.LENGTH, ("", [("add", '{"a": 1}')], "length")),
        ([{}], f"I add.\n{CALL[:20]}", FinishReason.LENGTH, ("I add.", [], "length")),
        ([{}], f"I add.\n{CALL[:20]}", FinishReason.STOP, (f"I add.\n{CALL[:20]}", [], "stop")),
        ([{}], "a <tool", FinishReason.LENGTH, ("a <tool", [], "length")),
    ],
)
async def test_case_bug_063_finish_reasons_of_calls(
    client: httpx2.AsyncClient,
    say: Callable[..., None],
    answer_of: Callable[..., Any],
    choices: list[dict[str, Any]],
    said: str,
    reason: FinishReason,
    expected: Answer,
) -> None:
    """tool_calls whenever a call was made and the text ended by itself, never with an empty list; length if cut, and
    then no markup of a call that could not be given."""
    say(said, reason)
    for choice in choices:
        assert await answer_of(client, **choice) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}", "tokenize": True}}, "chat_template_kwargs"),
    ],
)
async def test_case_bug_063_what_is_refused_names_its_field(
    client: httpx2.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    """With BUG-019: templates of requests."""
    response = await ask(client, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tools"),
        ({"tools": None, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": None, "structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"tools": None, "guided_choice": ["a"]}, "guided_choice"),
    ],
)
async def test_a_grammar_that_fails_later_is_named_by_the_field_that_it_came_from(
    client: httpx2.AsyncClient, service: Any, fields: dict[str, Any], param: str, stream: bool
) -> None:
    service.script = lambda _: [TokenDelta((500,)), TokenDelta((), FinishReason.ERROR, error="stuck", param="grammar")]
    response = await ask(client, stream=stream, **fields)
    lines = [line for line in response.text.splitlines() if "error" in line]
    error = json.loads(lines[0].removeprefix("data: "))["error"]
    assert (error["message"], error["param"], error["type"]) == ("stuck", param, "invalid_request_error")


@pytest.mark.parametrize("helper", ["parse", "stream"])
async def test_an_answer_goes_back_as_the_helpers_of_openai_s_client_give_it(
    client: httpx2.AsyncClient, say: Callable[..., None], helper: str
) -> None:
    """They add to the message what they have made of it."""
    chats = openai.AsyncOpenAI(base_url="http://octavo/v1", api_key="none", http_client=client).chat.completions
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    message: Any
    hello: Any = {"role": "user", "content": "Hi"}
    asked: Any = {"model": "smollm2", "messages": [hello], "tools": [strict]}
    say(CALL, FinishReason.STOP)
    if helper == "parse":
        message = (await chats.parse(**asked)).choices[0].message
    else:
        async with chats.stream(**asked) as stream:
            message = (await stream.get_final_completion()).choices[0].message
    (call,) = message.tool_calls
    assert call.function.parsed_arguments == {"a": 1}
    say("Done.", FinishReason.STOP)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    for given in (message, message.model_dump()):
        again = await chats.create(**{**asked, "messages": [hello, given, result]})
        assert again.choices[0].message.content == "Done."
