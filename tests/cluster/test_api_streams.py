"""What chunks are made of, and that a stream says what a whole answer does: messages of parts, ends, usage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import httpx2
import openai
import orjson
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from octavo.cluster.api.answer.message import MessageDelta, ToolCallDelta
from octavo.cluster.api.answer.responses import ChatFormat, StreamedAnswer, whole_answer
from octavo.cluster.api.answer.run import Run, StartingRun
from octavo.cluster.api.chat.reasoning import ReasoningTokens
from octavo.cluster.api.metrics import GatewayMetrics
from octavo.cluster.api.request.answer_options import AnswerOptions
from octavo.cluster.api.request.judged import JudgedRequest
from octavo.cluster.api.service import GenerationRequest, TokenDelta
from octavo.cluster.api.text.processor import TextProcessor
from octavo.worker.messages import FinishReason, SamplingParams

COMPLETION = {"model": "smollm2", "prompt": "The quick brown fox"}


class Brackets:
    """A parser to test with: <reasoning>, {arguments of a call}, and content; it is late by one character."""

    def __init__(self) -> None:
        self.has_tool_calls = False
        self._state = ""
        self._held = ""
        self._index = -1

    def push(self, text: str) -> MessageDelta:
        text, self._held = (self._held + text)[:-1], (self._held + text)[-1:]
        return self._take(text)

    def finish(self, *, is_cut: bool) -> MessageDelta:
        return self._take(self._held)

    def _take(self, text: str) -> MessageDelta:
        content = reasoning = ""
        calls: list[ToolCallDelta] = []
        for character in text:
            if character in "<>{}":
                self._state = character if character in "<{" else ""
                if character == "{":
                    self._index += 1
                    self.has_tool_calls = True
                    calls.append(ToolCallDelta(self._index, id=f"call-{self._index}", name="f"))
            elif self._state == "<":
                reasoning += character
            elif self._state == "{":
                calls.append(ToolCallDelta(self._index, character))
            else:
                content += character
        return MessageDelta(content, reasoning, tuple(calls))


Answers = Callable[..., Any]


@pytest.fixture
def answers(service: Any, say: Callable[..., None], text: TextProcessor) -> Answers:
    """The whole answer and the chunks of a stream for a chat whose model says ``said``."""

    async def answer(
        said: str, reason: FinishReason = FinishReason.STOP, *, sizes: Sequence[int] = (1,), **options: Any
    ) -> tuple[Any, list[Any]]:
        say(said, reason, sizes)
        sampling = SamplingParams(max_tokens=100, seed=0)
        request = GenerationRequest("r", "smollm2", (5, 6, 7), sampling)
        judged = JudgedRequest("chatcmpl-1", "smollm2", (request,), AnswerOptions(message_parser=Brackets, **options))
        metrics = GatewayMetrics("smollm2", "alone")
        run = await Run.start(judged, service, text, metrics, time.perf_counter())
        whole = orjson.loads(await whole_answer(run, ChatFormat(judged, text)))
        starting = StartingRun(Run.start(judged, service, text, metrics, time.perf_counter()))
        streamed, content = StreamedAnswer(starting, ChatFormat(judged, text), request_id="x"), b""
        while piece := await streamed.next():
            content += piece
        events = content.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return whole, [orjson.loads(event.removeprefix("data: ")) for event in events[:-2]]

    return answer


def message_of(chunks: list[Any]) -> dict[str, Any]:
    """The message that a client puts together."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}}
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks):
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        for piece in delta.get("tool_calls", []):
            call = message["tool_calls"].setdefault(piece["index"], {"function": {"arguments": ""}})
            assert ("id" in piece, "type" in piece, "name" in piece["function"]) == ("id" not in call,) * 3
            call["function"]["name"] = piece["function"].pop("name", call["function"].get("name"))
            call["function"]["arguments"] += piece["function"]["arguments"]
            call |= {name: piece[name] for name in ("id", "type") if name in piece}
    message["tool_calls"] = list(message["tool_calls"].values())
    return message


@pytest.mark.parametrize("sizes", [(1,), (2, 3), (99,)])
@pytest.mark.parametrize(
    "said",
    ["", "plain 👩", "<think>", "<think>say", "{a1}", "say{a1}{b2}", "<think>{a1}", "<unfinished", "{unfinished"],
)
async def test_a_streamed_message_is_the_whole_one(answers: Answers, said: str, sizes: Sequence[int]) -> None:
    whole, chunks = await answers(said, sizes=sizes)
    message = whole["choices"][0]["message"]
    streamed = message_of(chunks)
    assert streamed["content"] == (message["content"] or "")
    assert streamed["reasoning_content"] == message.get("reasoning_content", "")
    assert streamed["tool_calls"] == message.get("tool_calls", [])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    ChatCompletion.model_validate(whole)
    assert [ChatCompletionChunk.model_validate(chunk).id for chunk in chunks] == ["chatcmpl-1"] * len(chunks)


async def test_a_message_of_calls_alone_has_no_content(answers: Answers) -> None:
    whole, _ = await answers("{a1}{b2}")
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "call-0", "type": "function", "function": {"name": "f", "arguments": "a1"}},
            {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "b2"}},
        ],
    }


@pytest.mark.parametrize(
    ("said", "reason", "expected"),
    [
        ("{a1}", FinishReason.STOP, "tool_calls"),
        ("{a1", FinishReason.LENGTH, "length"),
        ("{a1}", FinishReason.TIMEOUT, "timeout"),
        ("none", FinishReason.STOP, "stop"),
    ],
)
async def test_case_bug_063_finish_reasons_of_calls(
    answers: Answers, said: str, reason: FinishReason, expected: str
) -> None:
    whole, chunks = await answers(said, reason)
    assert whole["choices"][0]["finish_reason"] == expected
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [expected]
    assert ("tool_calls" in whole["choices"][0]["message"]) == (said != "none")


@pytest.mark.parametrize("sizes", [(1,), (2, 3), (99,)])
async def test_reasoning_tokens_are_counted_however_tokens_travel(
    answers: Answers, text: TextProcessor, sizes: Sequence[int]
) -> None:
    said = "<think>Hm, so.</think>Four"
    ids = text._backend.encode(said).ids
    num = next(num for num in range(len(ids)) if "</think>" in text.decode(ids[:num]))
    counted = {"reasoning_tokens": partial(ReasoningTokens, is_open=False), "include_usage": True}
    whole, chunks = await answers(said, sizes=sizes, **counted)
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": num}
    assert chunks[-1]["usage"] == whole["usage"]
    whole, _ = await answers(said)
    assert "completion_tokens_details" not in whole["usage"]


async def test_a_stop_string_is_looked_for_before_the_message_is_taken_apart(answers: Answers) -> None:
    whole, chunks = await answers("<think>say stop{a1}", stop_strings=(" stop",))
    choice = whole["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("say", "stop", " stop")
    assert message_of(chunks)["content"] == "say"


# ---- ends ----


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [({}, None), ({"stop": " fox"}, " fox"), ({"stop_token_ids": [2]}, None), ({"stop_token_ids": [500]}, 500)],
)
async def test_stop_reasons(
    client: httpx2.AsyncClient, service: Any, text: TextProcessor, path: str, fields: dict[str, Any], reason: Any
) -> None:
    ids = text._backend.encode("The quick brown fox").ids
    end = reason if isinstance(reason, int) else 2
    service.script = lambda _: [TokenDelta(tuple(ids[:2])), TokenDelta((*ids[2:], end), FinishReason.STOP)]
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    body = {"model": "smollm2", **prompt, **fields}
    choice = (await client.post(path, json=body)).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
    lines = (await client.post(path, json={**body, "stream": True})).text.split("\n\n")
    last = orjson.loads(lines[-3].removeprefix("data: "))["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", reason)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("include", "expected"), [(True, "The quick brown"), (False, "The quick")])
async def test_the_stop_string_stays_if_wanted(address: str, stream: bool, include: bool, expected: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
        extra = {"include_stop_str_in_output": include}
        create: Any = client.completions.create
        answer = await create(**COMPLETION, stop=" brown", extra_body=extra, stream=stream)
        said = "".join([chunk.choices[0].text async for chunk in answer]) if stream else answer.choices[0].text
    assert said == expected


@pytest.mark.parametrize("skip", [True, False])
async def test_special_tokens_are_shown_if_wanted(client: httpx2.AsyncClient, service: Any, skip: bool) -> None:
    service.script = lambda _: [TokenDelta((500, 1, 501, 2), FinishReason.STOP)]
    fields = {"skip_special_tokens": skip}
    said = (await client.post("/v1/completions", json=COMPLETION | fields)).json()["choices"][0]["text"]
    assert said.count("<|im_start|>") == (not skip)
    assert "<|im_end|>" not in said


# ---- usage ----


async def test_usage_so_far_in_every_chunk(client: httpx2.AsyncClient, service: Any) -> None:
    service.script = lambda _: [
        TokenDelta((500,), num_cached_tokens=0),
        TokenDelta((501, 502)),
        TokenDelta((503,), FinishReason.LENGTH),
    ]
    body = {**COMPLETION, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    lines = (await client.post("/v1/completions", json=body)).text.split("\n\n")[:-2]
    chunks = [orjson.loads(line.removeprefix("data: ")) for line in lines]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 3, 4, 4, 4]
    assert all(chunk["usage"]["prompt_tokens"] == 4 for chunk in chunks)
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1, 1, 0]
