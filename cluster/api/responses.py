"""OpenAI's answer bodies and stream chunks, for chats and completions."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson

from ...worker.messages import FinishReason
from .errors import describe, log_if_unexpected
from .run import StartingRun, TextEvent, Usage

DONE = b"data: [DONE]\n\n"


class AnswerFormat(ABC):
    """Shapes one request's answer.

    ``finish_reason`` is stop, length or, beyond OpenAI's words, timeout: the request's own ``timeout`` ran out, and the
    choice has what there was by then.
    """

    object_name: str
    chunk_name: str

    def __init__(self, completion_id: str, model: str) -> None:
        self._head = {"id": completion_id, "created": int(time.time()), "model": model}

    def answer(self, texts: list[str], reasons: list[FinishReason], usage: Usage) -> bytes:
        """The whole answer in one body."""
        choices = [
            {"index": index, **self.whole(text), "logprobs": None, "finish_reason": reason.value}
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return orjson.dumps({**self._head, "object": self.object_name, "choices": choices, "usage": usage_body(usage)})

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """One event of a stream."""
        return sse(orjson.dumps({**self._head, "object": self.chunk_name, "choices": choices, **more}))

    def choice(self, index: int, content: dict[str, Any], reason: FinishReason | None = None) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": None, "finish_reason": reason.value if reason else None}

    @abstractmethod
    def whole(self, text: str) -> dict[str, Any]:
        """Where a choice of an answer carries its text."""

    @abstractmethod
    def part(self, text: str) -> dict[str, Any]:
        """Where a choice of a chunk carries its text."""

    @abstractmethod
    def opening(self) -> dict[str, Any] | None:
        """The content of a choice's first chunk, where it has one of its own."""

    @abstractmethod
    def closing(self) -> dict[str, Any]:
        """The content of a choice's last chunk, which carries the finish reason."""


class ChatFormat(AnswerFormat):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def part(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def closing(self) -> dict[str, Any]:
        return {"delta": {}}


class CompletionFormat(AnswerFormat):
    object_name = "text_completion"
    chunk_name = "text_completion"

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def part(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def opening(self) -> dict[str, Any] | None:
        return None

    def closing(self) -> dict[str, Any]:
        return {"text": ""}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def sse(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def stream_answer(
    starting: StartingRun, shape: AnswerFormat, *, include_usage: bool, request_id: str
) -> AsyncGenerator[bytes]:
    """The events of a streamed answer; of a run that may still be starting.

    For each choice: the role (chats), text, one chunk with the finish reason; then the usage if it was asked for, and
    ``[DONE]``. A failure is one event ``data: {"error": …}``, after which the stream ends without ``[DONE]``: clients
    see an error, never a short answer that looks whole. With ``include_usage`` every other chunk has a null usage.
    ``request_id`` is for the log.
    """
    more = {"usage": None} if include_usage else {}
    opened: set[int] = set()
    try:
        run = await starting.run()
        async with aclosing(run.events()) as events:
            async for event in events:
                contents = _contents(event, shape, first=event.index not in opened)
                # One write: what a write costs on its way through Ray Serve is more than what the chunks cost.
                yield b"".join(shape.chunk([content], **more) for content in contents)
                opened.add(event.index)
        if include_usage:
            yield shape.chunk([], usage=usage_body(run.usage()))
        yield DONE
    except Exception as error:
        log_if_unexpected(error, request_id)
        yield sse(describe(error).body())


def _contents(event: TextEvent, shape: AnswerFormat, *, first: bool) -> list[dict[str, Any]]:
    contents = []
    if first and (opening := shape.opening()) is not None:
        contents.append(shape.choice(event.index, opening))
    if event.text:
        contents.append(shape.choice(event.index, shape.part(event.text)))
    if event.finish_reason is not None:
        contents.append(shape.choice(event.index, shape.closing(), event.finish_reason))
    return contents
