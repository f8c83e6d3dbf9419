"""Engine: requests in, tokens out. One object per worker group, on its leader; runs without Ray.

It is driven from one thread: ``submit``, ``abort`` and ``step`` do not overlap. Every request that is submitted ends
exactly once, with an update that carries a finish reason for each of its branches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from .errors import InvalidRequest, OctavoError
from .messages import Branch, FinishReason, Request, RequestProgress, SequenceUpdate
from .plan_builder import ScheduledStep
from .sampling_row import SamplingRow
from .scheduler import Scheduler
from .sequence import Sequence, SequenceStatus
from .speed import SpeedMeter
from .step_plan import StepPlan


class StepExecutor(Protocol):
    def execute(self, plan: StepPlan, rows: list[SamplingRow]) -> list[int | None]: ...


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_computed_tokens: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))


@dataclass(slots=True)
class _Live:
    """A request under way and its sequences that have not ended."""

    request: Request
    sequences: list[Sequence]
    num_cached_tokens: int | None = None
    """Of the first branch that was computed; None until its prompt is."""
    num_output_tokens: int = 0
    """Of the branches that have ended."""

    def progress(self, *, finished: bool = False) -> RequestProgress:
        return RequestProgress(
            self.request.request_id,
            prefilled=self.num_cached_tokens is not None,
            finished=finished,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_output_tokens=self.num_output_tokens if finished else 0,
        )


class Engine:
    """``clock`` gives seconds; ``emit(gateway_id, update)`` takes what is for a gateway."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        *,
        clock: Callable[[], float],
        emit: Callable[[str, SequenceUpdate], None],
    ) -> None:
        self.scheduler = scheduler
        self.counters = EngineCounters()
        self.speed = SpeedMeter()
        self._executor = executor
        self._clock = clock
        self._emit = emit
        self._live: dict[str, _Live] = {}
        self._progress: dict[str, RequestProgress] = {}
        self._num_arrivals = 0
        self._next_deadline_s = math.inf
        """No sequence is late before this time."""

    # ---- what comes in ----

    def submit(self, request: Request) -> None:
        """Take a request. One that can never be served ends at once with ``FinishReason.ERROR`` and the reason.

        A request id that is under way already is the same request sent again, and is ignored.
        """
        if request.request_id in self._live:
            return
        try:
            self._judge(request)
        except OctavoError as error:
            self._refuse(request, str(error))
            return
        now = self._clock()
        sequences = [self._start(request, branch, now) for branch in request.branches]
        live = self._live[request.request_id] = _Live(request, list(sequences))
        self._note(live.progress())
        self._next_deadline_s = min([self._next_deadline_s, *_deadlines(sequences)])
        self.counters.num_prompt_tokens += len(request.prompt_token_ids)
        for sequence in sequences:
            reason = _stop_reason(sequence)
            if reason is not None:  # complete already: its end was lost on the way
                self._finish(sequence, reason)

    def _start(self, request: Request, branch: Branch, now: float) -> Sequence:
        sequence = Sequence.start(request, branch, arrival=self._num_arrivals, now=now)
        self._num_arrivals += 1
        self.scheduler.add(sequence)
        return sequence

    def _judge(self, request: Request) -> None:
        if not request.prompt_token_ids:
            raise InvalidRequest("the prompt has no tokens; at least 1 is needed", param="prompt")
        if not request.branches:
            raise InvalidRequest("the request has no branches; at least 1 is needed", param="n")
        self.scheduler.check_fits(len(request.prompt_token_ids), request.sampling.max_tokens)

    def _refuse(self, request: Request, message: str) -> None:
        self.counters.finished[FinishReason.ERROR] += len(request.branches)
        self._note(RequestProgress(request.request_id, prefilled=False, finished=True))
        for branch in request.branches:
            position = len(branch.output_token_ids)
            update = SequenceUpdate(request.request_id, branch.index, position, (), FinishReason.ERROR, None, message)
            self._emit(request.gateway_id, update)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request and free its blocks; harmless when it is unknown or has ended."""
        live = self._live.get(request_id)
        for sequence in list(live.sequences) if live else ():
            self._finish(sequence, reason)

    def abort_gateway(self, gateway_id: str) -> None:
        """End every request of a gateway that is gone."""
        for request_id in [r.request.request_id for r in self._live.values() if r.request.gateway_id == gateway_id]:
            self.abort(request_id)

    # ---- one step ----

    def step(self) -> bool:
        """Compute one step. False when there was nothing to compute."""
        self._expire(self._clock())
        step = self.scheduler.plan()
        if step is None:
            return False
        rows = [_sampling_row(sequence) for sequence in step.sampled]
        started = self._clock()
        tokens = self._executor.execute(step.plan, rows)
        self._account(step, self._clock() - started)
        for sequence, token in zip(step.sampled, tokens, strict=True):
            if token is None:
                self._finish(sequence, FinishReason.ERROR, "the next token could not be sampled")
            else:
                self._append(sequence, token)
        return True

    def _expire(self, now: float) -> None:
        """End what is late. Looks at every sequence only when the earliest deadline known has come."""
        if now < self._next_deadline_s:
            return
        sequences = [sequence for live in self._live.values() for sequence in live.sequences]
        for sequence in sequences:
            if sequence.deadline_s is not None and sequence.deadline_s <= now:
                self._finish(sequence, FinishReason.TIMEOUT)
        self._next_deadline_s = min((time for time in _deadlines(sequences) if time > now), default=math.inf)

    def _account(self, step: ScheduledStep, duration_s: float) -> None:
        self.counters.num_steps += 1
        self.counters.num_computed_tokens += step.plan.token_ids.size
        self.counters.num_generation_tokens += len(step.sampled)
        self.speed.note(step.num_prefill_tokens, len(step.sampled), duration_s)

    def _append(self, sequence: Sequence, token: int) -> None:
        position = sequence.num_output_tokens
        sequence.token_ids.append(token)
        live = self._live[sequence.request.request_id]
        if live.num_cached_tokens is None:
            live.num_cached_tokens = sequence.num_cached_tokens or 0
            self._note(live.progress())
        reason = _stop_reason(sequence)
        self._send(sequence, position, (token,), reason)
        if reason is not None:
            self._end(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End a sequence without a new token."""
        self._send(sequence, sequence.num_output_tokens, (), reason, error)
        self._end(sequence, reason)

    def _send(
        self,
        sequence: Sequence,
        position: int,
        tokens: tuple[int, ...],
        reason: FinishReason | None,
        error: str | None = None,
    ) -> None:
        request, cached = sequence.request, sequence.num_cached_tokens
        update = SequenceUpdate(request.request_id, sequence.branch, position, tokens, reason, cached, error)
        self._emit(request.gateway_id, update)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self.counters.finished[reason] += 1
        self.scheduler.finish(sequence, reason)
        live = self._live[sequence.request.request_id]
        live.sequences.remove(sequence)
        live.num_output_tokens += sequence.num_output_tokens
        if not live.sequences:
            del self._live[live.request.request_id]
            self._note(live.progress(finished=True))

    # ---- what can be seen ----

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def num_requests(self) -> int:
        return len(self._live)

    def drain_progress(self) -> tuple[RequestProgress, ...]:
        """What became of requests since the last call."""
        progress, self._progress = self._progress, {}
        return tuple(progress.values())

    def live_progress(self) -> tuple[RequestProgress, ...]:
        """All requests under way, for a router that knows nothing yet."""
        return tuple(live.progress() for live in self._live.values())

    def _note(self, progress: RequestProgress) -> None:
        self._progress[progress.request_id] = progress

    def check(self) -> None:
        """Prove the invariants of scheduler, pool and cache; see ``Scheduler.check``."""
        self.scheduler.check()
        sequences = [sequence for live in self._live.values() for sequence in live.sequences]
        if any(sequence.status is SequenceStatus.FINISHED for sequence in sequences):
            raise RuntimeError("a sequence has ended and is still counted as under way")
        num_scheduled = self.scheduler.num_running + self.scheduler.num_waiting
        if len(sequences) != num_scheduled:
            raise RuntimeError(f"{len(sequences)} sequences are under way, but {num_scheduled} run or wait")
        if any(time < self._next_deadline_s for time in _deadlines(sequences)):
            raise RuntimeError("a deadline would be missed")


def _sampling_row(sequence: Sequence) -> SamplingRow:
    sampling = sequence.request.sampling
    position = sequence.num_output_tokens
    return SamplingRow(
        seed=sampling.seed,
        branch=sequence.branch,
        position=position,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        banned_token_ids=sampling.stop_token_ids if position < sampling.min_tokens else (),
    )


def _stop_reason(sequence: Sequence) -> FinishReason | None:
    """Why the sequence ends with the tokens that it has now, or None."""
    sampling = sequence.request.sampling
    num_output_tokens = sequence.num_output_tokens
    if num_output_tokens > sampling.min_tokens and sequence.token_ids[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    if num_output_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None


def _deadlines(sequences: list[Sequence]) -> list[float]:
    return [sequence.deadline_s for sequence in sequences if sequence.deadline_s is not None]
