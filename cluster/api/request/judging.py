"""From the bytes of a body to a judged request: in this process, or in another one that has a judge of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import orjson

from ..answer.embedding_answer import EncodingFormat
from ..chat.prompts import DEFAULT_OPTIONS, ChatOptions
from ..http.caller import Caller
from ..service import ServedModel
from ..text.processor import TextProcessor
from .judged import JudgedRequest, RequestJudge
from .schemas import ChatCompletionRequest, CompletionRequest, EmbeddingRequest

T = TypeVar("T")

Judging = Callable[[RequestJudge, bytes | bytearray, Caller], Awaitable[T]]
"""A function of a module, so that its name says to another process which one is meant.

Its result and its exceptions go from one process to the other. Bodies are JSON as RFC 8259 has it: NaN, infinities,
unpaired surrogates and nesting deeper than 1,024 are none. Of a name that is there twice the last value counts.
"""


@dataclass(frozen=True, slots=True)
class JudgeRecipe:
    """What it takes to make a judge, in whatever process."""

    folder: Path
    model: ServedModel
    chat_template: str | None = None
    options: ChatOptions = DEFAULT_OPTIONS

    def text(self) -> TextProcessor:
        return TextProcessor.load(self.folder, chat_template=self.chat_template, options=self.options)

    def judge(self) -> RequestJudge:
        return RequestJudge(self.text(), self.model)


@dataclass(frozen=True, slots=True)
class Asked:
    """A judged request, and how it is answered."""

    judged: JudgedRequest
    stream: bool


async def chat(judge: RequestJudge, raw: bytes | bytearray, caller: Caller) -> Asked:
    """Raises ValidationError, orjson.JSONDecodeError, or what the judge does."""
    body = ChatCompletionRequest.model_validate(orjson.loads(raw))
    return Asked(await judge.judge_chat(body, caller), bool(body.stream))


@dataclass(frozen=True, slots=True)
class AskedEmbedding:
    judged: JudgedRequest
    encoding_format: EncodingFormat


async def embedding(judge: RequestJudge, raw: bytes | bytearray, caller: Caller) -> AskedEmbedding:
    """Raises as ``chat``."""
    body = EmbeddingRequest.model_validate(orjson.loads(raw))
    return AskedEmbedding(await judge.judge_embedding(body, caller), body.encoding_format or "float")


async def completion(judge: RequestJudge, raw: bytes | bytearray, caller: Caller) -> Asked:
    """Raises as ``chat``."""
    body = CompletionRequest.model_validate(orjson.loads(raw))
    return Asked(await judge.judge_completion(body, caller), bool(body.stream))
