"""One HTTP request's generations under way: their events in one stream, their common end, their usage."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from ....worker.errors import GenerationFailed, InvalidRequest, Overloaded, Unavailable
from ....worker.messages import FinishReason, TokenLogprobs
from ...watch.request_watch import RequestWatch
from ..errors import DeadlineMissed
from ..metrics import GatewayMetrics
from ..request.judged import JudgedRequest
from ..request_meter import RequestMeter
from ..service import Generation, GenerationService, TokenDelta
from ..text.processor import TextProcessor
from .output import OutputText, OutputToken

_RETRY_AFTER_S = 1.0
"""Where the group that refused a request did not say more."""

QUEUED = "queued"
"""The reason in the header of a stream that began while its request waited in the router."""


class TextEvent(NamedTuple):
    """New text of one choice, its end, or both. One is made for each token: a frozen dataclass would take three times
    as long."""

    choice: int
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """See ``OutputText``."""
    tokens: tuple[OutputToken, ...] = ()
    """Those whose text has begun to be given since the choice's last event, where the answer speaks of tokens."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """With a choice's first event: of the prompt's tokens but the first, where the engine was asked for them."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    """Of the completion's; None where there can be none."""


class _Fan:
    """One generation and the choices that its branches are."""

    def __init__(
        self,
        generation: Generation,
        outputs: list[OutputText],
        meter: RequestMeter,
        *,
        first_index: int,
        grammar_field: str | None,
    ) -> None:
        """``first_index`` is the choice that branch 0 is; the others follow it. ``grammar_field``: of AnswerOptions."""
        self.generation = generation
        self.outputs = outputs
        self.embedding: bytes | None = None
        self._meter = meter
        self._first_index = first_index
        self._grammar_field = grammar_field
        self._running = set(range(len(outputs)))
        """Branches that the engine works on, as far as we know."""
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._silent = set(self._running)
        """Branches without an event so far."""

    @property
    def is_open(self) -> bool:
        """Something may come."""
        return bool(self._running)

    def take_into(self, events: list[TextEvent]) -> None:
        """Add what has come. Raises what ``_check`` finds."""
        try:
            for delta in self.generation.take():
                if delta.branch not in self._running:
                    continue  # tokens that were on their way when a stop string ended the branch
                if (event := self._take(delta)) is None:
                    continue
                if event.finish_reason is not None and not self._running:
                    self._meter.end(event.finish_reason)  # before a client can leave with its last event
                events.append(event)
        except Exception:
            self._meter.end(FinishReason.ERROR)
            raise

    def abort(self) -> None:
        """Tell the engine that the request is over, unless it said so."""
        self._meter.end(FinishReason.ABORT)
        if self._running:
            self._running.clear()
            self.generation.abort()

    def _take(self, delta: TokenDelta) -> TextEvent | None:
        output = self.outputs[delta.branch]
        before = output.num_tokens
        text = output.push(delta)
        self._meter.tokens(delta.branch, output.num_tokens - before, delta.num_cached_tokens, delta.phases)
        if delta.branch == 0 and text:
            self._meter.keep(text)
        if delta.prompt_logprobs:
            self._prompt_logprobs += delta.prompt_logprobs
        if delta.embedding is not None:
            self.embedding = delta.embedding
        if output.finish_reason is not None:
            self._end(delta)
        tokens = output.take_tokens()
        if not (text or tokens or output.finish_reason is not None):
            return None
        choice, prompt_logprobs = self._first_index + delta.branch, self._prompt_told(delta.branch)
        return TextEvent(choice, text, output.finish_reason, output.stop_reason, tokens, prompt_logprobs)

    def _prompt_told(self, branch: int) -> Sequence[TokenLogprobs]:
        if branch not in self._silent:
            return ()
        self._silent.discard(branch)
        return self._prompt_logprobs

    def _end(self, delta: TokenDelta) -> None:
        """A branch has ended."""
        self._running.discard(delta.branch)
        if delta.finish_reason is None:  # a stop string is found only here
            self.generation.end(delta.branch)
        self._check(delta)

    def _check(self, delta: TokenDelta) -> None:
        """Ends that are no answer. A timeout is one if there is output: the client has set that limit itself."""
        match self.outputs[delta.branch].finish_reason:
            case FinishReason.ERROR if delta.param is not None:
                raise InvalidRequest(delta.error or "", param=self._asked_by(delta.param), code=delta.code)
            case FinishReason.ERROR:
                raise GenerationFailed(delta.error or "The engine failed while it worked on this request.")
            case FinishReason.ABORT:
                raise Unavailable(delta.error or "The cluster ended this request before it was complete.")
            case FinishReason.OVERLOADED:
                self._meter.end(FinishReason.OVERLOADED)
                message = delta.error or "The request waited for longer than its queue_timeout."
                raise Overloaded(message, retry_after_s=delta.retry_after_s or _RETRY_AFTER_S)
            case FinishReason.TIMEOUT if not any(output.num_tokens for output in self.outputs):
                self._meter.end(FinishReason.TIMEOUT)
                raise DeadlineMissed("The request's timeout ran out before its first token.")

    def _asked_by(self, param: str) -> str:
        """The request's field for one of SamplingParams: a grammar comes from several, and has none of its own name."""
        return self._grammar_field or param if param == "grammar" else param


class Run:
    """All choices of one request. Whoever starts a run asks for ``next`` to the end or calls ``abort``, which a
    ``with`` block does."""

    def __init__(self, judged: JudgedRequest, fans: Sequence[_Fan]) -> None:
        self._judged = judged
        self._fans = fans
        self._failure: Exception | None = None
        self._has_news = False
        self._news: asyncio.Future[None] | None = None
        """What the reader waits for. A queue would take longer for each token than all else here."""
        for fan in fans:
            fan.generation.listen(self._wake)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    @classmethod
    async def start(
        cls,
        judged: JudgedRequest,
        service: GenerationService,
        text: TextProcessor,
        metrics: GatewayMetrics,
        arrival: float,
        watch: RequestWatch | None = None,
    ) -> Self:
        """Submit every generation; when one is refused none is left running. Raises what the service raises.

        ``watch`` is told of what becomes of them.
        """
        requests = judged.generations if watch is None else watch.marked(judged)
        meters = [RequestMeter(metrics, request, arrival) for request in requests]
        if watch is not None:
            watch.measured_by(meters, text.decode)
        starts = [asyncio.ensure_future(service.start(request)) for request in requests]
        try:
            generations = await asyncio.gather(*starts)
        except BaseException as error:
            await _undo(starts)
            for meter in meters:
                meter.end(_reason_of(error))
            raise
        fans: list[_Fan] = []
        first_index = 0
        for request, generation, meter in zip(requests, generations, meters, strict=True):
            meter.placed(generation)
            outputs = [judged.output_text(text, request) for _ in range(request.num_branches)]
            field = judged.answer.grammar_field
            fans.append(_Fan(generation, outputs, meter, first_index=first_index, grammar_field=field))
            first_index += request.num_branches
        return cls(judged, fans)

    async def next(self) -> Sequence[TextEvent]:
        """What has come of all choices since the last call, at least something; nothing after their ends.

        An exception of one choice ends them all, and is raised after what came before it.
        """
        while self._failure is None and (self._has_news or self._is_open):
            if not self._has_news:
                self._news = asyncio.get_running_loop().create_future()
                await self._news
            self._has_news = False
            if events := self._take():
                return events
        if self._failure is not None:
            raise self._failure
        return ()

    @property
    def _is_open(self) -> bool:
        """Something may come."""
        for fan in self._fans:  # noqa: SIM110 - twice as fast as any(), and asked with every token
            if fan.is_open:
                return True
        return False

    def _take(self) -> list[TextEvent]:
        events: list[TextEvent] = []
        try:
            for fan in self._fans:
                fan.take_into(events)
        except Exception as error:
            self.abort()
            if not events:
                raise
            self._failure = error
        return events

    def _wake(self) -> None:
        self._has_news = True
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def abort(self) -> None:
        """End whatever is still under way; never blocks."""
        for fan in self._fans:
            fan.abort()

    def usage(self) -> Usage:
        """A prompt counts once, whatever the number of its choices."""
        outputs = [output for fan in self._fans for output in fan.outputs]
        reasoning = [num for output in outputs if (num := output.num_reasoning_tokens) is not None]
        return Usage(
            sum(len(generation.prompt_token_ids) for generation in self._judged.generations),
            sum(output.num_tokens for output in outputs),
            sum(output.num_cached_tokens for output in outputs),
            sum(reasoning) if reasoning else None,
        )

    def embeddings(self) -> list[bytes]:
        """The vectors of a run that was to give them, in the order of its prompts, after its last event."""
        vectors = [fan.embedding for fan in self._fans]
        if any(vector is None for vector in vectors):
            raise GenerationFailed("The engine gave no embedding for a prompt.")
        return [vector for vector in vectors if vector is not None]

    def headers(self) -> dict[str, str]:
        """Where the prompts were routed, and why."""
        routes = [fan.generation.route for fan in self._fans]
        headers = {
            "x-octavo-group": ",".join(dict.fromkeys(route.group for route in routes)),
            "x-octavo-cached-tokens": str(sum(route.expected_cached_tokens for route in routes)),
            "x-octavo-route-reason": ",".join(dict.fromkeys(route.reason for route in routes)),
        }
        slowest = {
            "x-octavo-expected-ttft-ms": max(route.expected_ttft_s for route in routes),
            "x-octavo-queue-ms": max(route.queued_s for route in routes),
        }
        return headers | {name: f"{1000 * seconds:.0f}" for name, seconds in slowest.items() if seconds > 0.0}


class StartingRun:
    """A run that is being started, beside whoever waits for it."""

    def __init__(self, start: Coroutine[Any, Any, Run]) -> None:
        self._task = asyncio.create_task(start)

    async def within(self, seconds: float | None) -> bool:
        """Whether the start is over, well or not, after ``seconds`` at the most; None: however long it takes."""
        return bool((await asyncio.wait({self._task}, timeout=seconds))[0])

    async def run(self) -> Run:
        """Raises what ``Run.start`` does."""
        return await self._task

    def abort(self) -> None:
        """End the start or what was started. Never blocks; harmless when all is over."""
        if not self._task.cancel() and not self._task.cancelled() and self._task.exception() is None:
            self._task.result().abort()


async def _undo(starts: Sequence[asyncio.Future[Generation]]) -> None:
    """End what has begun and what is still beginning."""
    for start in starts:
        start.cancel()
    for outcome in await asyncio.gather(*starts, return_exceptions=True):
        if not isinstance(outcome, BaseException):
            outcome.abort()


def _reason_of(error: BaseException) -> FinishReason:
    """How requests ended that were refused, or given up before they were placed."""
    if isinstance(error, Overloaded):
        return FinishReason.OVERLOADED
    return FinishReason.ERROR if isinstance(error, Exception) else FinishReason.ABORT
