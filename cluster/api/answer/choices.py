"""One choice of an answer, as the chunks of a stream or as a whole: both are made of the same pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....worker.messages import FinishReason
from ..request.answer_options import AnswerOptions
from ..text.token_bytes import TokenBytes
from .logprobs_format import CompletionLogprobs, Name, chat_entries, prompt_logprobs_body
from .message import MessageDelta, PlainMessage, ToolCallDelta
from .output import OutputToken
from .prompt_echo import PromptEcho
from .run import TextEvent


class Choice(Protocol):
    """Takes its events either by ``parts`` or by ``add``."""

    @property
    def is_plain(self) -> bool:
        """The part of an event that is text and nothing else is ``text_part``."""
        ...

    def text_part(self, text: str) -> dict[str, Any]: ...

    def parts(self, event: TextEvent) -> list[dict[str, Any]]:
        """What the next chunks say of the choice. The very last part, and no other, has a finish reason."""
        ...

    def add(self, event: TextEvent) -> None: ...

    def whole(self) -> dict[str, Any]:
        """All that was added."""
        ...


class ChatChoice:
    """Log-probabilities and token ids are those of all output tokens, whatever they became: content, reasoning, calls
    or nothing."""

    def __init__(self, index: int, options: AnswerOptions, name: Name, token_bytes: TokenBytes) -> None:
        self._index = index
        self._options = options
        self._name = name
        self._token_bytes = token_bytes
        self._parser = options.message_parser()
        self._is_open = False
        self._message = _Message()
        self._tokens: list[OutputToken] = []
        self._end: dict[str, Any] = {}

    @property
    def is_plain(self) -> bool:
        return self._is_open and self._options.message_parser is PlainMessage

    def text_part(self, text: str) -> dict[str, Any]:
        return self._part({"content": text})

    def parts(self, event: TextEvent) -> list[dict[str, Any]]:
        delta = self._message_delta(event)
        parts = []
        if not self._is_open:
            self._is_open = True
            parts.append(self._part({"role": "assistant", "content": ""}))
        if delta or event.tokens:
            parts.append(self._part(_chunk_delta(delta), event.tokens))
        if event.finish_reason is not None:
            parts.append(self._part({}) | self._ended(event))
        return parts

    def add(self, event: TextEvent) -> None:
        self._message.add(self._message_delta(event))
        self._tokens += event.tokens
        if event.finish_reason is not None:
            self._end = self._ended(event)

    def whole(self) -> dict[str, Any]:
        choice = {"index": self._index, "message": self._message.body(), "logprobs": self._logprobs(self._tokens)}
        return choice | self._end | _token_ids(self._tokens, self._options)

    def _part(self, delta: dict[str, Any], tokens: Sequence[OutputToken] = ()) -> dict[str, Any]:
        part = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
        if tokens:
            part["logprobs"] = self._logprobs(tokens)
            part |= _token_ids(tokens, self._options)
        return part

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any] | None:
        num = self._options.num_logprobs
        if num is None:
            return None
        return {"content": chat_entries(tokens, num, self._name, self._token_bytes), "refusal": None}

    def _message_delta(self, event: TextEvent) -> MessageDelta:
        delta = self._parser.push(event.text)
        if event.finish_reason is None:
            return delta
        return delta + self._parser.finish(is_cut=event.finish_reason is not FinishReason.STOP)

    def _ended(self, event: TextEvent) -> dict[str, Any]:
        """A text that ends by itself behind a tool call has ended for that."""
        is_call = event.finish_reason is FinishReason.STOP and self._parser.has_tool_calls
        return _ended(event) | ({"finish_reason": "tool_calls"} if is_call else {})


class CompletionChoice:
    """With an echo, the prompt comes with the first event."""

    def __init__(
        self, index: int, options: AnswerOptions, name: Name, prompt_token_ids: Sequence[int], echo: PromptEcho | None
    ) -> None:
        self._index = index
        self._options = options
        self._name = name
        self._prompt_token_ids = prompt_token_ids
        self._echo = echo
        self._echoed = "" if echo is None else echo.text
        self._first: TextEvent | None = None
        self._pieces: list[str] = []
        self._tokens: list[OutputToken] = []
        self._end: dict[str, Any] = {}

    @property
    def is_plain(self) -> bool:
        return self._first is not None

    def text_part(self, text: str) -> dict[str, Any]:
        return self._choice(text, ())

    def parts(self, event: TextEvent) -> list[dict[str, Any]]:
        prompt: dict[str, Any] = {}
        text, opening = event.text, None
        if self._first is None:
            self._first = opening = event
            text = self._echoed + text
            prompt = self._prompt_fields(event)
        parts = []
        if text or event.tokens or prompt:
            parts.append(self._choice(text, event.tokens, opening) | prompt)
        if event.finish_reason is not None:
            parts.append(self._choice("", ()) | _ended(event))
        return parts

    def add(self, event: TextEvent) -> None:
        self._first = self._first or event
        self._pieces.append(event.text)
        self._tokens += event.tokens
        if event.finish_reason is not None:
            self._end = _ended(event)

    def whole(self) -> dict[str, Any]:
        text = self._echoed + "".join(self._pieces)
        prompt = {} if self._first is None else self._prompt_fields(self._first)
        return self._choice(text, self._tokens, self._first) | self._end | prompt

    def _choice(self, text: str, tokens: Sequence[OutputToken], opening: TextEvent | None = None) -> dict[str, Any]:
        """``opening``: the first event of the choice, where its text begins here."""
        logprobs = self._logprobs(tokens, opening)
        choice = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return choice | _token_ids(tokens, self._options)

    def _logprobs(self, tokens: Sequence[OutputToken], opening: TextEvent | None) -> dict[str, Any] | None:
        if self._options.num_logprobs is None:
            return None
        logprobs = CompletionLogprobs(self._options.num_logprobs, self._name)
        if opening is not None and self._echo is not None:
            logprobs.add_prompt(self._echo.token_ids, opening.prompt_logprobs, self._echo.offsets)
        logprobs.add(tokens, first_offset=len(self._echoed))
        return logprobs.body() if logprobs.tokens or opening is not None else None

    def _prompt_fields(self, first: TextEvent) -> dict[str, Any]:
        return prompt_fields(self._options, self._prompt_token_ids, first, self._name)


def prompt_fields(
    options: AnswerOptions, prompt_token_ids: Sequence[int], event: TextEvent, name: Name
) -> dict[str, Any]:
    """What vLLM's fields tell of a prompt, where they were asked for. ``event`` is the first of one of its choices."""
    fields: dict[str, Any] = {}
    if options.return_token_ids:
        fields["prompt_token_ids"] = prompt_token_ids
    if (num := options.num_prompt_logprobs) is not None:
        fields["prompt_logprobs"] = prompt_logprobs_body(prompt_token_ids, event.prompt_logprobs, num, name)
    return fields


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str]


@dataclass(slots=True)
class _Message:
    """An assistant's message, growing."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)

    def add(self, delta: MessageDelta) -> None:
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        for piece in delta.tool_calls:
            call = self.calls.setdefault(piece.index, _Call(piece.id or "", piece.name or "", []))
            call.arguments.append(piece.arguments)

    def body(self) -> dict[str, Any]:
        """Without text beside tool calls the content is null, as at OpenAI."""
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["content"] = content or None
            message["tool_calls"] = [
                _call_body(call.id, call.name, "".join(call.arguments)) for _, call in sorted(self.calls.items())
            ]
        return message


def _chunk_delta(delta: MessageDelta) -> dict[str, Any]:
    """A ``delta`` of OpenAI's chunks; with nothing to say it has an empty content."""
    if not (delta.reasoning or delta.tool_calls):
        return {"content": delta.content}
    body: dict[str, Any] = {}
    if delta.reasoning:
        body["reasoning_content"] = delta.reasoning
    if delta.content:
        body["content"] = delta.content
    if delta.tool_calls:
        body["tool_calls"] = [_chunk_call(piece) for piece in delta.tool_calls]
    return body


def _chunk_call(piece: ToolCallDelta) -> dict[str, Any]:
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    return {"index": piece.index} | _call_body(piece.id, piece.name or "", piece.arguments)


def _call_body(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _token_ids(tokens: Sequence[OutputToken], options: AnswerOptions) -> dict[str, Any]:
    return {"token_ids": [token.token_id for token in tokens]} if options.return_token_ids else {}


def _ended(event: TextEvent) -> dict[str, Any]:
    reason = event.finish_reason
    return {"finish_reason": reason.value if reason else None, "stop_reason": event.stop_reason}
