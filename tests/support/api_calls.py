"""Calls of the API as a client makes them, whose answers look the same streamed and not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
import orjson
from serve_process import Server

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
TIMEOUT_S = 120.0


@dataclass
class Choice:
    """One choice, put together."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    num_finish_reasons: int = 0
    logprobs: list[Any] = field(default_factory=list)
    """Chats: the entries; completions: (token, logprob, top, offset) of each token."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Answer:
    """``error`` is set where the status is not 200, or the stream ended in an error event."""

    status: int
    headers: dict[str, str]
    choices: list[Choice] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    is_done: bool = True
    """The stream ended with [DONE]."""
    chunks: list[dict[str, Any]] = field(default_factory=list)
    """Of a stream; empty for a whole answer."""

    @property
    def text(self) -> str:
        (choice,) = self.choices
        return choice.text

    @property
    def finish_reason(self) -> str | None:
        (choice,) = self.choices
        return choice.finish_reason


def complete(server: Server, prompt: Any, *, stream: bool = False, **fields: Any) -> Answer:
    return call(server, COMPLETION, {"prompt": prompt} | fields, stream=stream)


def chat(server: Server, messages: str | list[dict[str, Any]], *, stream: bool = False, **fields: Any) -> Answer:
    """A text is one message of the user."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return call(server, CHAT, {"messages": messages} | fields, stream=stream)


def call(
    server: Server,
    path: str,
    body: dict[str, Any] | bytes,
    *,
    stream: bool = False,
    headers: dict[str, str] | None = None,
) -> Answer:
    """POST ``body``, to which the model's name and ``stream`` are added unless it is bytes."""
    if isinstance(body, dict):
        asked = {"stream_options": {"include_usage": True}} if stream else {}
        body = json.dumps({"model": server.model, "stream": stream} | asked | body).encode()  # of any depth
    headers = {"content-type": "application/json"} | (headers or {})
    with httpx.stream("POST", f"{server.url}{path}", content=body, headers=headers, timeout=TIMEOUT_S) as response:
        if "text/event-stream" in response.headers.get("content-type", ""):
            return _streamed(response)
        return _whole(response)


def _whole(response: Any) -> Answer:
    answer = Answer(response.status_code, dict(response.headers))
    body = orjson.loads(response.read())
    answer.error, answer.usage = body.get("error"), body.get("usage")
    for each in body.get("choices", []):
        choice = _choice(answer, each["index"])
        _add(choice, each, each.get("message") or {})
    return answer


def _streamed(response: Any) -> Answer:
    answer = Answer(response.status_code, dict(response.headers), is_done=False)
    for line in response.iter_lines():
        if not line.startswith("data: "):
            assert line == "" or line.startswith(":"), line
            continue
        assert not answer.is_done, f"after [DONE]: {line}"
        if line == "data: [DONE]":
            answer.is_done = True
            continue
        chunk = orjson.loads(line.removeprefix("data: "))
        answer.chunks.append(chunk)
        answer.error = chunk.get("error")
        answer.usage = chunk.get("usage") or answer.usage
        for each in chunk.get("choices", []):
            _add(_choice(answer, each["index"]), each, each.get("delta") or {})
    return answer


def _choice(answer: Answer, index: int) -> Choice:
    while len(answer.choices) <= index:
        answer.choices.append(Choice())
    return answer.choices[index]


def _add(choice: Choice, each: dict[str, Any], message: dict[str, Any]) -> None:
    choice.text += each.get("text") or message.get("content") or ""
    choice.reasoning += message.get("reasoning_content") or ""
    if each.get("finish_reason") is not None:
        choice.finish_reason = each["finish_reason"]
        choice.num_finish_reasons += 1
    choice.logprobs += _entries(each.get("logprobs"))
    for number, piece in enumerate(message.get("tool_calls") or []):
        _add_tool_call(choice, piece.get("index", number), piece)


def _add_tool_call(choice: Choice, index: int, piece: dict[str, Any]) -> None:
    if index == len(choice.tool_calls):
        choice.tool_calls.append({"id": piece["id"], "type": piece["type"], "function": {"name": "", "arguments": ""}})
    function = piece.get("function") or {}
    call = choice.tool_calls[index]["function"]
    call["name"] += function.get("name") or ""
    call["arguments"] += function.get("arguments") or ""


def _entries(logprobs: dict[str, Any] | None) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return list(logprobs["content"] or [])
    columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], logprobs["text_offset"])
    return list(zip(*columns, strict=True))
