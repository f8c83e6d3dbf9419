"""What LLM gives for a prompt, put together from the events of its run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...worker.errors import OctavoError
from ...worker.messages import TokenLogprobs
from ..api.answer.choices import ChatChoice
from ..api.answer.logprobs_format import namer
from ..api.answer.output import OutputToken
from ..api.answer.prompt_echo import PromptEcho
from ..api.answer.run import TextEvent
from ..api.request.answer_options import AnswerOptions
from ..api.request.judged import JudgedRequest
from ..api.text.processor import TextProcessor


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """What a chat's output says, taken apart."""

    content: str | None
    """None where there are tool calls alone."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a prompt's ``n`` outputs."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """Up to the one that ended it, included."""
    finish_reason: str
    """stop, length, tool_calls (chats), or timeout."""
    stop_reason: str | int | None
    """The stop string, or the id of the stop token that is not the model's own end."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of ``token_ids``, where ``logprobs`` was asked for."""
    message: ChatMessage | None = None
    """Of chats."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    prompt: str | None
    """None where it came as token ids, or as a chat."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    """Empty where ``error`` says why."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were computed before."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One for each token of the prompt, None for the first, where they were asked for: by ``prompt_logprobs``, or by
    ``echo`` with ``logprobs``."""
    error: OctavoError | None = None
    """What ended it without an answer: a ``timeout`` before the first token, or what only this request met."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    embedding: NDArray[np.float32]
    """[hidden], of Euclidean length 1."""


class GatheredOutput:
    """Takes the events of one prompt's run."""

    def __init__(self, judged: JudgedRequest, text: TextProcessor, prompt: str | None, *, is_chat: bool) -> None:
        (generation,) = judged.generations
        self._prompt = prompt
        self._prompt_token_ids = generation.prompt_token_ids
        self._options = judged.answer
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        echo = ""
        if judged.answer.echo:
            skips = judged.answer.skip_special_tokens
            echo = PromptEcho(generation.prompt_token_ids, text, said=prompt, skip_special_tokens=skips).text
        indices = range(generation.num_branches)
        self._choices = [_Choice(index, echo, self._chat(index, text) if is_chat else None) for index in indices]

    def _chat(self, index: int, text: TextProcessor) -> ChatChoice:
        options = replace(self._options, num_logprobs=None)
        return ChatChoice(index, options, namer(text.token_bytes, as_ids=True), text.token_bytes)

    def add(self, event: TextEvent) -> None:
        num = _num_prompt_logprobs(self._options)
        if num is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = (None, *(_likeliest(each, num) for each in event.prompt_logprobs))
        self._choices[event.choice].add(event)

    def whole(self, num_cached_tokens: int) -> RequestOutput:
        wants_logprobs = self._options.num_logprobs is not None
        outputs = tuple(choice.output(wants_logprobs=wants_logprobs) for choice in self._choices)
        return RequestOutput(self._prompt, self._prompt_token_ids, outputs, num_cached_tokens, self._prompt_logprobs)

    def failed(self, error: OctavoError) -> RequestOutput:
        return RequestOutput(self._prompt, self._prompt_token_ids, (), error=error)


class _Choice:
    def __init__(self, index: int, echo: str, chat: ChatChoice | None) -> None:
        self._index = index
        self._pieces = [echo]
        self._tokens: list[OutputToken] = []
        self._chat = chat
        self._end: TextEvent | None = None

    def add(self, event: TextEvent) -> None:
        self._pieces.append(event.text)
        self._tokens += event.tokens
        if self._chat is not None:
            self._chat.add(event)
        if event.finish_reason is not None:
            self._end = event

    def output(self, *, wants_logprobs: bool) -> CompletionOutput:
        if self._end is None or self._end.finish_reason is None:
            raise RuntimeError(f"output {self._index} has not ended")
        chat = None if self._chat is None else self._chat.whole()
        return CompletionOutput(
            self._index,
            "".join(self._pieces),
            tuple(token.token_id for token in self._tokens),
            self._end.finish_reason.value if chat is None else chat["finish_reason"],
            self._end.stop_reason,
            tuple(token.logprobs for token in self._tokens if token.logprobs) if wants_logprobs else None,
            None if chat is None else _message(chat["message"]),
        )


def _num_prompt_logprobs(options: AnswerOptions) -> int | None:
    """Alternatives for each token of the prompt; None: nothing is told of them."""
    if options.num_prompt_logprobs is not None or not options.echo:
        return options.num_prompt_logprobs
    return options.num_logprobs


def _likeliest(judged: TokenLogprobs, num: int) -> TokenLogprobs:
    """With ``num`` alternatives: the engine may have been asked for more, for the echo's sake."""
    if len(judged.top_token_ids) <= num:
        return judged
    return replace(judged, top_token_ids=judged.top_token_ids[:num], top_logprobs=judged.top_logprobs[:num])


def _message(body: dict[str, Any]) -> ChatMessage:
    """Of OpenAI's form."""
    calls = body.get("tool_calls", ())
    tool_calls = (ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls)
    return ChatMessage(body["content"], body.get("reasoning_content"), tuple(tool_calls))
