"""OpenAI's answer bodies and stream chunks, for chats and completions."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from ..errors import describe, log_if_unexpected
from ..request.judged import JudgedRequest
from ..text.processor import TextProcessor
from .choices import ChatChoice, Choice, CompletionChoice, prompt_fields
from .logprobs_format import namer
from .prompt_echo import PromptEcho
from .run import Run, StartingRun, TextEvent, Usage

DONE = b"data: [DONE]\n\n"
_LONG_PROMPT = 1024
"""Tokens from which a prompt is told of in a thread: so many ids take 0.05 ms, their text 0.5 ms."""
_TEXT = "the text"
"""Stands for a text in a frame."""


class AnswerFormat(ABC):
    """Shapes one request's answer, whole or as a stream. Made when the request was judged.

    ``finish_reason`` is stop, length, tool_calls (chats) or, beyond OpenAI's words, timeout: the request's own
    ``timeout`` ran out, and the choice has what there was by then. ``stop_reason`` is vLLM's: the stop string or the
    id of the stop token that ended the choice; null where the model ended it itself. In a stream it comes with the
    finish reason.
    """

    object_name: str
    chunk_name: str

    def __init__(self, judged: JudgedRequest, text: TextProcessor) -> None:
        self._options = judged.answer
        self._prompts = [generation.prompt_token_ids for generation in judged.generations]
        self._name = namer(text.token_bytes, as_ids=self._options.tokens_as_ids)
        self._head = {"id": judged.completion_id, "created": int(time.time()), "model": judged.model}
        chunk_head = orjson.dumps({**self._head, "object": self.chunk_name})
        self._chunk_head = b"data: " + chunk_head[:-1] + b',"choices":['
        owners = [prompt for prompt, each in enumerate(judged.generations) for _ in range(each.num_branches)]
        self._text_frames: dict[int, tuple[bytes, bytes]] = {}
        """Choice → what is around the text of a chunk with nothing else in it, as nearly all are."""
        self._silent = set(range(len(owners)))
        """Choices of a stream without a chunk so far."""
        self._choices = [self._choice(index, prompt, text) for index, prompt in enumerate(owners)]

    def chunks(self, event: TextEvent, usage: Callable[[], Usage]) -> bytes:
        """The events of a stream that say what ``event`` does; ``usage`` is that so far. In one piece: what a write
        costs on its way through Ray Serve is more than what the chunks cost."""
        if event.choice in self._text_frames and event.finish_reason is None and not event.tokens:
            head, rest = self._text_frames[event.choice]
            return head + orjson.dumps(event.text) + rest
        choice, tail = self._choices[event.choice], self._chunk_tail(usage)
        prompt, chunks = self._prompt_part(event), []
        for part in choice.parts(event):
            chunks.append(b"".join((self._chunk_head, orjson.dumps(part), b"]", prompt, tail)))
            prompt = b""
        if event.choice in self._silent:
            self._silent.discard(event.choice)
            if choice.is_plain and not self._options.continuous_usage:
                self._text_frames[event.choice] = self._text_frame(choice, tail)
        return b"".join(chunks)

    def usage_chunk(self, usage: Usage) -> bytes | None:
        """The last chunk of a stream that was asked for one."""
        if not self._options.include_usage:
            return None
        return self._chunk_head + b"]" + _usage_tail(usage)

    def add(self, event: TextEvent) -> None:
        """Take an event of an answer that is not streamed."""
        self._choices[event.choice].add(event)

    def whole(self, usage: Usage) -> bytes:
        """The answer of all that was added, in one body."""
        choices = [choice.whole() for choice in self._choices]
        body = {**self._head, "object": self.object_name, "choices": choices, "usage": usage_body(usage)}
        return orjson.dumps(body | self._more())

    @property
    def takes_long(self) -> bool:
        """Shaping the answer may take as long as thousands of tokens do, and is no work for the event loop."""
        options = self._options
        return options.tells_tokens or options.echo or options.num_prompt_logprobs is not None

    def chunks_take_long(self, event: TextEvent) -> bool:
        """Likewise for the chunks of one event: the first of a choice may tell all of its prompt."""
        if event.choice not in self._silent:
            return False
        tells_prompt = self._options.return_token_ids or self._options.echo
        return bool(event.prompt_logprobs) or (tells_prompt and max(map(len, self._prompts)) >= _LONG_PROMPT)

    def _text_frame(self, choice: Choice, tail: bytes) -> tuple[bytes, bytes]:
        head, rest = orjson.dumps(choice.text_part(_TEXT)).split(orjson.dumps(_TEXT))
        return self._chunk_head + head, rest + b"]" + tail

    def _chunk_tail(self, usage: Callable[[], Usage]) -> bytes:
        if self._options.continuous_usage:
            return _usage_tail(usage())
        return b',"usage":null}\n\n' if self._options.include_usage else b"}\n\n"

    def _prompt_part(self, event: TextEvent) -> bytes:
        """What a chunk has of the prompt beside its choices."""
        return b""

    def _more(self) -> dict[str, Any]:
        """What an answer has beside its choices."""
        return {}

    @abstractmethod
    def _choice(self, index: int, prompt: int, text: TextProcessor) -> Choice:
        """A new choice, an output of the ``prompt``-th prompt."""


class ChatFormat(AnswerFormat):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    _first: TextEvent | None = None
    """The first event of all tells of the prompt."""

    def add(self, event: TextEvent) -> None:
        self._first = self._first or event
        super().add(event)

    def _choice(self, index: int, prompt: int, text: TextProcessor) -> Choice:
        return ChatChoice(index, self._options, self._name, text.token_bytes)

    def _more(self) -> dict[str, Any]:
        return {} if self._first is None else self._prompt_fields(self._first)

    def _prompt_part(self, event: TextEvent) -> bytes:
        if self._first is not None:
            return b""
        self._first = event
        fields = self._prompt_fields(event)
        return b"," + orjson.dumps(fields)[1:-1] if fields else b""

    def _prompt_fields(self, first: TextEvent) -> dict[str, Any]:
        return prompt_fields(self._options, self._prompts[0], first, self._name)


class CompletionFormat(AnswerFormat):
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, judged: JudgedRequest, text: TextProcessor) -> None:
        self._echoes: dict[int, PromptEcho] = {}
        super().__init__(judged, text)

    def _choice(self, index: int, prompt: int, text: TextProcessor) -> Choice:
        echo = self._echo(prompt, text) if self._options.echo else None
        return CompletionChoice(index, self._options, self._name, self._prompts[prompt], echo)

    def _echo(self, prompt: int, text: TextProcessor) -> PromptEcho:
        if prompt not in self._echoes:
            texts = self._options.prompt_texts
            said = texts[prompt] if prompt < len(texts) else None
            self._echoes[prompt] = PromptEcho(
                self._prompts[prompt], text, said=said, skip_special_tokens=self._options.skip_special_tokens
            )
        return self._echoes[prompt]


def usage_body(usage: Usage) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return body


def _usage_tail(usage: Usage) -> bytes:
    return b',"usage":' + orjson.dumps(usage_body(usage)) + b"}\n\n"


async def answer_format(shape: type[AnswerFormat], judged: JudgedRequest, text: TextProcessor) -> AnswerFormat:
    """A new one; in a thread where prompts may have to be decoded for it."""
    return await asyncio.to_thread(shape, judged, text) if judged.answer.echo else shape(judged, text)


async def whole_answer(run: Run, shape: AnswerFormat) -> bytes:
    """The body of an answer that is not streamed, when the last choice has ended. Raises what ``run.next`` does."""
    with run:
        while events := await run.next():
            for event in events:
                shape.add(event)
    if shape.takes_long:
        return await asyncio.to_thread(shape.whole, run.usage())
    return shape.whole(run.usage())


class StreamedAnswer:
    """The events of a streamed answer; of a run that may still be starting.

    For each choice: the role (chats), text, one chunk with the finish reason; then the usage if it was asked for, and
    ``[DONE]``. A failure is one event ``data: {"error": …}``, after which the stream ends without ``[DONE]``: clients
    see an error, never a short answer that looks whole. With ``include_usage`` every other chunk has a null usage, with
    ``continuous_usage`` that so far. ``request_id`` is for the log.
    """

    def __init__(self, starting: StartingRun, shape: AnswerFormat, *, request_id: str) -> None:
        self._starting = starting
        self._shape = shape
        self._request_id = request_id
        self._run: Run | None = None
        self._is_over = False

    async def next(self) -> bytes:
        """What can be sent now, at least one event; nothing after the last."""
        if self._is_over:
            return b""
        try:
            run = self._run = self._run or await self._starting.run()
            while events := await run.next():
                if chunks := await self._chunks(run, events):  # else a message's parser waits for more
                    return chunks
            self._is_over = True
            return (self._shape.usage_chunk(run.usage()) or b"") + DONE
        except Exception as error:
            self._is_over = True
            log_if_unexpected(error, self._request_id)
            return sse(describe(error).body())

    async def _chunks(self, run: Run, events: Sequence[TextEvent]) -> bytes:
        chunks = []
        for event in events:
            if self._shape.chunks_take_long(event):
                chunks.append(await asyncio.to_thread(self._shape.chunks, event, run.usage))
            else:
                chunks.append(self._shape.chunks(event, run.usage))
        return b"".join(chunks)


def sse(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
