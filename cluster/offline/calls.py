"""A call of LLM: all of its requests are judged, then all are handed to the engine, which batches them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from ...worker.errors import GenerationFailed, OctavoError
from ..api.answer.embedding_answer import normalised
from ..api.answer.run import Run
from ..api.http.caller import Caller
from ..api.request.judged import JudgedRequest
from ..api.request.schemas import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from ..api.service import RouteWishes
from .inputs import as_refusal, of_prompt
from .model import LocalModel
from .progress import Progress
from .results import EmbeddingOutput, GatheredOutput, RequestOutput

MOST_AT_ONCE = 4096
"""Requests that the engine is given at once; it runs ``max_num_seqs`` of them."""

_NOBODY = Caller(RouteWishes())

T = TypeVar("T")
Body = dict[str, Any]
Judging = Callable[[LocalModel, Body], Awaitable[JudgedRequest]]


@dataclass(slots=True)
class _Asked:
    """One prompt's request."""

    body: Body
    judged: JudgedRequest

    def prompt(self, field: str) -> str | None:
        """As it came, if that was as a text."""
        value = self.body[field]
        return value if isinstance(value, str) else None


async def answer_prompts(model: LocalModel, bodies: Sequence[Body], shows: bool | None) -> list[RequestOutput]:
    """See ``LLM.generate``."""
    return await _answer(model, bodies, _completion, "prompt", shows)


async def answer_chats(model: LocalModel, bodies: Sequence[Body], shows: bool | None) -> list[RequestOutput]:
    """See ``LLM.chat``."""
    return await _answer(model, bodies, _chat, "messages", shows)


async def embed(model: LocalModel, bodies: Sequence[Body], shows: bool | None) -> list[EmbeddingOutput]:
    """See ``LLM.embed``."""

    async def vector(asked: _Asked, progress: Progress) -> EmbeddingOutput:
        run = await model.start(asked.judged)
        with run:
            while await run.next():
                pass
        (embedding,) = run.embeddings()
        token_ids = asked.judged.generations[0].prompt_token_ids
        progress.prompt(len(token_ids))
        return EmbeddingOutput(asked.prompt("input"), token_ids, normalised(embedding))

    return await _all(await _judged(model, bodies, _embedding, "inputs"), vector, shows)


async def _answer(
    model: LocalModel, bodies: Sequence[Body], judging: Judging, field: str, shows: bool | None
) -> list[RequestOutput]:
    async def answer(asked: _Asked, progress: Progress) -> RequestOutput:
        gathered = GatheredOutput(asked.judged, model.text, asked.prompt(field), is_chat=field == "messages")
        try:
            return await _gather(await model.start(asked.judged), gathered, progress)
        except OctavoError as error:
            if model.service.failure is not None:
                raise GenerationFailed(str(error)) from error
            return gathered.failed(error)

    name = "prompts" if field == "prompt" else field
    return await _all(await _judged(model, bodies, judging, name), answer, shows)


async def _gather(run: Run, gathered: GatheredOutput, progress: Progress) -> RequestOutput:
    is_first = True
    with run:
        while events := await run.next():
            if is_first:
                progress.prompt(run.usage().prompt_tokens)
                is_first = False
            for event in events:
                progress.output(len(event.tokens))
                gathered.add(event)
    return gathered.whole(run.usage().cached_tokens)


async def _all(
    asked: Sequence[_Asked], work: Callable[[_Asked, Progress], Coroutine[Any, Any, T]], shows: bool | None
) -> list[T]:
    """What ``work`` makes of each, in their order; the first exception ends all."""
    places, progress = asyncio.Semaphore(MOST_AT_ONCE), Progress(len(asked), shows)

    async def one(each: _Asked) -> T:
        async with places:
            result = await work(each, progress)
        progress.done()
        return result

    async with progress.refreshed():
        tasks = [asyncio.ensure_future(one(each)) for each in asked]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _judged(model: LocalModel, bodies: Sequence[Body], judging: Judging, name: str) -> list[_Asked]:
    """All requests, or the first one's fault. Raises InvalidRequest, ContextLengthExceeded."""
    outcomes = await asyncio.gather(*(judging(model, body) for body in bodies), return_exceptions=True)
    asked = []
    for index, (body, outcome) in enumerate(zip(bodies, outcomes, strict=True)):
        if isinstance(outcome, (OctavoError, ValidationError)):
            error = as_refusal(outcome)
            raise of_prompt(error, f"{name}[{index}]") if len(bodies) > 1 else error
        if isinstance(outcome, BaseException):
            raise outcome
        asked.append(_Asked(body, outcome))
    return asked


async def _completion(model: LocalModel, body: Body) -> JudgedRequest:
    request = CompletionRequest.model_validate({"model": model.name, "return_token_ids": True, **body})
    return await model.judge.judge_completion(request, _NOBODY)


async def _chat(model: LocalModel, body: Body) -> JudgedRequest:
    request = ChatCompletionRequest.model_validate({"model": model.name, "return_token_ids": True, **body})
    return await model.judge.judge_chat(request, _NOBODY)


async def _embedding(model: LocalModel, body: Body) -> JudgedRequest:
    request = EmbeddingRequest.model_validate({"model": model.name, **body})
    return await model.judge.judge_embedding(request, _NOBODY)
