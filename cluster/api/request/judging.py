"""From the bytes of a body to a judged request: in this process, or in another one that has a judge of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
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
from .judges import Judges
from .schemas import ChatCompletionRequest, CompletionRequest, EmbeddingRequest

T = TypeVar("T")

Judging = Callable[[Judges, bytes | bytearray, Caller], Awaitable[T]]
"""A function of a module, so that its name says to another process which one is meant.

Its result and its exceptions go from one process to the other. Bodies are JSON as RFC 8259 has it: NaN, infinities,
unpaired surrogates and nesting deeper than 1,024 are none. Of a name that is there twice the last value counts.
"""


@dataclass(frozen=True, slots=True)
class JudgeRecipe:
    """What it takes to make the judge of one model, in whatever process."""

    folder: Path
    model: ServedModel
    chat_template: str | None = None
    options: ChatOptions = DEFAULT_OPTIONS

    def text(self) -> TextProcessor:
        return TextProcessor.load(self.folder, chat_template=self.chat_template, options=self.options)

    def judge(self) -> RequestJudge:
        return RequestJudge(self.text(), self.model)


def judges_of(recipes: Sequence[JudgeRecipe]) -> Judges:
    """Those of all models; takes a part of a second for each."""
    return Judges([recipe.judge() for recipe in recipes])


@dataclass(frozen=True, slots=True)
class Asked:
    """A judged request, and how it is answered."""

    judged: JudgedRequest
    stream: bool


async def chat(judges: Judges, raw: bytes | bytearray, caller: Caller) -> Asked:
    """Raises ValidationError, orjson.JSONDecodeError, ModelNotFound, or what the judge does."""
    body = ChatCompletionRequest.model_validate(orjson.loads(raw))
    return Asked(await judges.named(body.model).judge_chat(body, caller), bool(body.stream))


@dataclass(frozen=True, slots=True)
class AskedEmbedding:
    judged: JudgedRequest
    encoding_format: EncodingFormat


async def embedding(judges: Judges, raw: bytes | bytearray, caller: Caller) -> AskedEmbedding:
    """Raises as ``chat``."""
    body = EmbeddingRequest.model_validate(orjson.loads(raw))
    return AskedEmbedding(await judges.named(body.model).judge_embedding(body, caller), body.encoding_format or "float")


async def completion(judges: Judges, raw: bytes | bytearray, caller: Caller) -> Asked:
    """Raises as ``chat``."""
    body = CompletionRequest.model_validate(orjson.loads(raw))
    return Asked(await judges.named(body.model).judge_completion(body, caller), bool(body.stream))
