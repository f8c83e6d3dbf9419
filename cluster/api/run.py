"""One HTTP request's generations under way: their events in one stream, their common end, their usage."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Self

from ...worker.errors import GenerationFailed, Unavailable
from ...worker.messages import FinishReason
from .errors import DeadlineMissed
from .merge import merged
from .metrics import GatewayMetrics, OutputMeter
from .output import OutputText
from .requests import JudgedRequest
from .service import Generation, GenerationService, TokenDelta
from .text import TextProcessor


@dataclass(frozen=True, slots=True)
class TextEvent:
    """New text of one choice, its end, or both."""

    index: int
    text: str
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class _Choice:
    """One generation with its output."""

    def __init__(self, index: int, generation: Generation, output: OutputText, meter: OutputMeter) -> None:
        self.index = index
        self.generation = generation
        self.output = output
        self._meter = meter
        self._engine_is_done = False

    async def events(self) -> AsyncGenerator[TextEvent]:
        """Text until the end. Raises what ``_check`` finds; in every case the engine holds nothing of it afterwards."""
        try:
            async for delta in self.generation.tokens():
                text = self._take(delta)
                reason = self.output.finish_reason
                if text or reason is not None:
                    yield TextEvent(self.index, text, reason)
                if reason is not None:
                    self._meter.end(reason)
                    return
            raise GenerationFailed("The generation stopped without giving a reason.")
        except Exception:
            self._meter.end(FinishReason.ERROR)
            raise
        finally:
            self.abort()

    def abort(self) -> None:
        """Tell the engine that the output is over, unless it said so: a stop string is found only here."""
        self._meter.end(FinishReason.ABORT)
        if not self._engine_is_done:
            self._engine_is_done = True
            self.generation.abort()

    def _take(self, delta: TokenDelta) -> str:
        self._engine_is_done = delta.finish_reason is not None
        before = self.output.num_tokens
        text = self.output.push(delta)
        self._meter.tokens(self.output.num_tokens - before, delta.num_cached_tokens)
        self._check(delta)
        return text

    def _check(self, delta: TokenDelta) -> None:
        """Ends that are no answer. A timeout is one if there is output: the client has set that limit itself."""
        match self.output.finish_reason:
            case FinishReason.ERROR:
                raise GenerationFailed(delta.error or "The engine failed while it worked on this request.")
            case FinishReason.ABORT:
                raise Unavailable(delta.error or "The cluster ended this request before it was complete.")
            case FinishReason.TIMEOUT if self.output.num_tokens == 0:
                self._meter.end(FinishReason.TIMEOUT)
                raise DeadlineMissed("The request's timeout ran out before its first token.")


class Run:
    """All choices of one request. Whoever starts a run reads ``events`` to the end or calls ``abort``."""

    def __init__(self, judged: JudgedRequest, choices: list[_Choice]) -> None:
        self.judged = judged
        self._choices = choices

    @classmethod
    async def start(
        cls,
        judged: JudgedRequest,
        service: GenerationService,
        text: TextProcessor,
        metrics: GatewayMetrics,
        arrival: float,
    ) -> Self:
        """Submit every generation; when one is refused none is left running. Raises what the service raises."""
        run = cls(judged, [])
        try:
            for index, output in enumerate(judged.output_texts(text)):
                request = judged.generations[index]
                generation = await service.start(request)
                meter = OutputMeter(metrics, len(request.prompt_token_ids), arrival)
                run._choices.append(_Choice(index, generation, output, meter))
        except BaseException:
            run.abort()
            raise
        return run

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    async def events(self) -> AsyncGenerator[TextEvent]:
        """The events of all choices as they come. An exception of one ends them all."""
        try:
            async for event in merged([choice.events() for choice in self._choices]):
                yield event
        finally:
            self.abort()

    def abort(self) -> None:
        """End whatever is still under way; never blocks."""
        for choice in self._choices:
            choice.abort()

    def usage(self) -> Usage:
        return Usage(
            sum(len(generation.prompt_token_ids) for generation in self.judged.generations),
            sum(choice.output.num_tokens for choice in self._choices),
            sum(choice.output.num_cached_tokens for choice in self._choices),
        )

    def headers(self) -> dict[str, str]:
        """Where the choices were routed, and why."""
        routes = [choice.generation.route for choice in self._choices]
        return {
            "x-octavo-group": ",".join(dict.fromkeys(route.group for route in routes)),
            "x-octavo-cached-tokens": str(sum(route.expected_cached_tokens for route in routes)),
            "x-octavo-route-reason": ",".join(dict.fromkeys(route.reason for route in routes)),
        }


async def collect(run: Run) -> tuple[list[str], list[FinishReason]]:
    """Texts and finish reasons of all choices, when the last has ended."""
    texts = [""] * run.num_choices
    reasons = [FinishReason.STOP] * run.num_choices
    async for event in run.events():
        texts[event.index] += event.text
        if event.finish_reason is not None:
            reasons[event.index] = event.finish_reason
    return texts, reasons
