"""Tool calls: what is forced is made, what is named exists, and the finish reason says what happened."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_calls import Choice, chat
from openai import OpenAI
from serve_process import OneModel

pytestmark = pytest.mark.usefixtures("canary")

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def check_call(choice: Choice) -> None:
    assert choice.finish_reason == "tool_calls"
    assert choice.tool_calls
    for call in choice.tool_calls:
        assert call["id"]
        assert call["type"] == "function"
        assert call["function"]["name"] == "get_weather"
        arguments = json.loads(call["function"]["arguments"])
        assert set(arguments) == {"city", "unit"}
        assert arguments["unit"] in ("C", "F")


@pytest.mark.parametrize("tool_choice", ["required", NAMED], ids=["required", "named"])
def test_case_bug_063_forced_calls(cluster: OneModel, stream: bool, tool_choice: Any) -> None:
    answer = chat(
        cluster,
        "What is the weather in Paris?",
        tools=[WEATHER],
        tool_choice=tool_choice,
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
        stream=stream,
    )
    assert answer.status == 200, answer
    (choice,) = answer.choices
    check_call(choice)
    assert len(choice.tool_calls) == 1


def test_case_bug_063_streamed_and_whole_are_the_same(cluster: OneModel) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200, "temperature": 0}
    one, other = (chat(cluster, "Weather in Rome?", stream=stream, **fields).choices[0] for stream in (False, True))
    assert [call["function"] for call in one.tool_calls] == [call["function"] for call in other.tool_calls]
    assert (one.text, one.finish_reason) == (other.text, other.finish_reason)


def test_case_bug_063_a_call_that_is_cut(cluster: OneModel, stream: bool) -> None:
    answer = chat(
        cluster, "Weather?", tools=[WEATHER], tool_choice="required", max_tokens=3, temperature=0, stream=stream
    )
    assert (answer.finish_reason, answer.text) == ("length", "")
    for chunk in answer.chunks:
        for choice in chunk["choices"]:
            assert choice["delta"].get("tool_calls") != []


@pytest.mark.parametrize("tool_choice", ["auto", "none", None])
def test_case_bug_063_nothing_forced(cluster: OneModel, stream: bool, tool_choice: str | None) -> None:
    answer = chat(
        cluster, "Say hello", tools=[WEATHER], tool_choice=tool_choice, max_tokens=24, temperature=0, stream=stream
    )
    assert answer.status == 200, answer
    (choice,) = answer.choices
    assert choice.finish_reason in ("stop", "length", "tool_calls")
    assert (choice.finish_reason == "tool_calls") <= bool(choice.tool_calls)
    if tool_choice == "none":
        assert not choice.tool_calls


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
    ],
)
def test_case_bug_063_tools_that_are_not_there(
    cluster: OneModel, stream: bool, fields: dict[str, Any], param: str
) -> None:
    answer = chat(cluster, "Weather?", max_tokens=8, stream=stream, **fields)
    assert answer.status == 400, answer
    assert (answer.error or {})["param"].startswith(param)


def test_a_conversation_with_a_tool(client: OpenAI, cluster: OneModel) -> None:
    """As agent frameworks do: a call is made, its result is told, and the answer goes on from there."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    first = client.chat.completions.create(
        model=cluster.model,
        messages=messages,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
    )
    message = first.choices[0].message
    assert message.tool_calls
    messages.append(message.model_dump(exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 7}'} for call in message.tool_calls]
    second = client.chat.completions.create(model=cluster.model, messages=messages, tools=[WEATHER], max_tokens=24)
    assert second.choices[0].finish_reason in ("stop", "length", "tool_calls")
