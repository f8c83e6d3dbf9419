"""Engine: requests in, tokens out. One object per worker group, on its leader; runs without Ray.

It is driven from one thread: ``submit``, ``abort`` and ``step`` do not overlap. Every request that is submitted ends
exactly once, with an update that carries a finish reason for each of its branches.

While a step runs, the next one is planned and handed to the executor, which then needs not wait for the engine. That
is not possible while a beam search is under way: what it does next depends on the tokens of the step before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from .beam_run import BeamRun
from .deadlines import Deadlines
from .errors import InvalidRequest
from .histogram import REQUEST_SECONDS, STEP_TOKENS, Histogram
from .judge import judge
from .live_request import LiveRequest
from .messages import Branch, FinishReason, Request, RequestProgress, SequenceUpdate, TokenLogprobs
from .plan_builder import PromptRead, ScheduledStep
from .sampling_row import Candidate, SamplingRow, StepResult
from .sampling_state import MatcherOf, states_of
from .scheduler import Scheduler
from .sequence import Sequence, SequenceStatus
from .speed import SpeedMeter
from .step_plan import StepPlan

_PLANNING_MARGIN_S = 0.002
"""The next step is planned so long before the one under way is expected to end, and twice what planning takes."""

_SAMPLING_ERROR = "the next token could not be sampled"
_NAN_ERROR = "the model gave no number for the next token: its logits hold NaN, or none that is finite"
_PROMPT_NAN_ERROR = "the model gave no number for a token of the prompt: NaN, or none that is finite"


class StepExecutor(Protocol):
    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        """Start a step; it runs after those launched before it."""
        ...


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_computed_tokens: int = 0
    num_nan_rows: int = 0
    """Rows of logits that held NaN, or no finite number."""
    step_tokens: Histogram = field(default_factory=partial(Histogram, STEP_TOKENS))
    queue_s: Histogram = field(default_factory=partial(Histogram, REQUEST_SECONDS))
    """From a request's receipt to the first step that computes a part of it."""
    prefill_s: Histogram = field(default_factory=partial(Histogram, REQUEST_SECONDS))
    """From then to its first token."""
    decode_s: Histogram = field(default_factory=partial(Histogram, REQUEST_SECONDS))
    """From then to its end."""
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))


@dataclass(slots=True)
class _UnderWay:
    """A step that was launched and not yet taken in."""

    step: ScheduledStep
    result: Future[StepResult]
    started_s: float


class Engine:
    """``clock`` gives seconds; ``emit(gateway_id, update)`` takes what is for a gateway.

    ``speed`` is told of every step; the scheduler's token budget may ask the same object. ``matcher_of`` makes what
    follows a grammar.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        *,
        clock: Callable[[], float],
        emit: Callable[[str, SequenceUpdate], None],
        speed: SpeedMeter | None = None,
        matcher_of: MatcherOf | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.counters = EngineCounters()
        self.speed = speed or SpeedMeter()
        self._executor = executor
        self._clock = clock
        self._emit = emit
        self._matcher_of = matcher_of
        self._live: dict[str, LiveRequest] = {}
        self._progress: dict[str, RequestProgress] = {}
        self._under_way: _UnderWay | None = None
        self._planning_s = 0.0
        self._num_arrivals = 0
        self._deadlines = Deadlines(scheduler.is_queued)

    # ---- what comes in ----

    def submit(self, request: Request) -> None:
        """Take a request. One that can never be served ends at once with ``FinishReason.ERROR`` and the reason.

        A request id that is under way already is the same request sent again, and is ignored.
        """
        if request.request_id in self._live:
            return
        try:
            judge(request, self.scheduler)
            states = states_of(request, self._matcher_of)
        except InvalidRequest as error:
            self._refuse(request, error)
            return
        live = self._live[request.request_id] = LiveRequest(request, self._clock(), self._start(request), states)
        if request.sampling.beam_width is not None:
            live.search = BeamRun(request.sampling, self.scheduler, live.sequences[0])
        self._note(live.progress())
        self._deadlines.add(live.sequences)
        self.counters.num_prompt_tokens += len(request.prompt_token_ids)
        for sequence in list(live.sequences):
            reason = _stop_reason(sequence)
            if reason is not None:  # complete already: its end was lost on the way
                self._finish(sequence, reason)

    def _start(self, request: Request) -> list[Sequence]:
        """A sequence for all branches that have no output yet, which are forked when they have; one for each other.

        A beam search starts from the prompt, whatever it had found elsewhere.
        """
        is_search = request.sampling.beam_width is not None
        fresh = [0] if is_search else [branch.index for branch in request.branches if not branch.output_token_ids]
        resumed = [] if is_search else [branch for branch in request.branches if branch.output_token_ids]
        starts = [(fresh, Branch(fresh[0]))] if fresh else []
        starts += [([branch.index], branch) for branch in resumed]
        return [self._add(request, indices, branch) for indices, branch in starts]

    def _add(self, request: Request, indices: list[int], branch: Branch) -> Sequence:
        sequence = Sequence.start(
            request, indices, branch.output_token_ids, arrival=self._num_arrivals, now=self._clock()
        )
        self._num_arrivals += 1
        self.scheduler.add(sequence)
        return sequence

    def _refuse(self, request: Request, error: InvalidRequest) -> None:
        self.counters.finished[FinishReason.ERROR] += len(request.branches)
        self._note(RequestProgress(request.request_id, prefilled=False, finished=True, tenant=request.tenant))
        for branch in request.branches:
            position = len(branch.output_token_ids)
            update = SequenceUpdate(
                request.request_id,
                branch.index,
                position,
                (),
                FinishReason.ERROR,
                error=str(error),
                param=error.param,
                code=error.code,
            )
            self._emit(request.gateway_id, update)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT, *, branch: int | None = None) -> None:
        """End a request, or one branch of it, and free its blocks; harmless when it is unknown or has ended.

        A beam search has no branches before its end: it is aborted as a whole or not at all.
        """
        live = self._live.get(request_id)
        if live is None or (branch is not None and live.search is not None):
            return
        for sequence in list(live.sequences):
            if sequence.status is SequenceStatus.FINISHED:
                continue  # a beam, with the rest of its search
            if branch is None:
                self._finish(sequence, reason)
            elif branch == sequence.branch or branch in sequence.unforked_branches:
                self._end_branch(sequence, branch, reason)

    def _end_branch(self, sequence: Sequence, branch: int, reason: FinishReason) -> None:
        if not sequence.unforked_branches:
            self.scheduler.note_length(sequence)  # a stop string was found in it
            self._finish(sequence, reason)
            return
        branches = [sequence.branch, *sequence.unforked_branches]
        branches.remove(branch)
        sequence.branch, sequence.unforked_branches = branches[0], branches[1:]
        self._send(sequence, branch, sequence.num_output_tokens, (), reason)
        self.counters.finished[reason] += 1

    def abort_gateway(self, gateway_id: str) -> None:
        """End every request of a gateway that is gone."""
        for request_id in [r.request.request_id for r in self._live.values() if r.request.gateway_id == gateway_id]:
            self.abort(request_id)

    def reset_prefix_cache(self) -> int:
        """Forget all cached content; the number of blocks forgotten. What is under way goes on."""
        return self.scheduler.reset_prefix_cache()

    # ---- one step ----

    def step(self) -> bool:
        """Plan and launch a step, then take in the one launched before it. False when there was nothing to do."""
        self._expire(self._clock())
        if not self._plans_ahead:
            self._take_in()
        before, self._under_way = self._under_way, self._launch()
        is_busy = before is not None or self._under_way is not None
        if before is not None:
            self._take_in_step(before)
            if self._under_way is not None:
                self._under_way.started_s = self._clock()
        if not self._plans_ahead:
            self._take_in()
        return is_busy

    def skip_decodes(self, times_s: list[float]) -> None:
        """Count a call of ``step`` at each of these times, which took in a decode of all running sequences and launched
        another one; what such calls do to the sequences is left to the caller. RuntimeError when nothing is under way.
        """
        under_way, num_sequences = self._under_way, self.scheduler.num_running
        if under_way is None:
            raise RuntimeError("an idle engine has no steps to skip")
        for time_s in times_s:
            self.speed.note(0, num_sequences, time_s - under_way.started_s)
            under_way.started_s = time_s
        num_tokens = len(times_s) * num_sequences
        self.counters.num_steps += len(times_s)
        self.counters.step_tokens.add(num_sequences, len(times_s))
        self.counters.num_computed_tokens += num_tokens
        self.counters.num_generation_tokens += num_tokens

    @property
    def _plans_ahead(self) -> bool:
        return self.scheduler.limits.plans_ahead and self.scheduler.num_running_beams == 0

    def _launch(self) -> _UnderWay | None:
        started = self._clock()
        step = self.scheduler.plan()
        if step is None:
            return None
        for sequence in step.forks:
            self._live[sequence.request.request_id].sequences.append(sequence)
        rows = [self._sampling_row(*each) for each in zip(step.sampled, step.positions, strict=True)]
        now = self._clock()
        self._planning_s = now - started
        for sequence in step.admitted:
            self._note_admitted(sequence, now)
        return _UnderWay(step, self._executor.launch(step.plan, rows), now)

    def _note_admitted(self, sequence: Sequence, now: float) -> None:
        """It may have ended since: admitted where no step came of it, and given up before the next one."""
        live = self._live.get(sequence.request.request_id)
        if live is not None and live.admitted_s is None and any(each is sequence for each in live.sequences):
            live.admitted_s = now
            self.counters.queue_s.add(now - live.received_s)

    def _sampling_row(self, sequence: Sequence, position: int) -> SamplingRow:
        sampling = sequence.request.sampling
        live = self._live[sequence.request.request_id]
        return SamplingRow(
            seed=sampling.seed,
            branch=sequence.branch,
            position=position,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            banned_token_ids=sampling.stop_token_ids if position < sampling.min_tokens else (),
            num_candidates=0 if live.search is None else live.search.num_candidates,
            min_p=sampling.min_p,
            num_logprobs=None if live.search is not None else sampling.num_logprobs,
            state=live.states.get(sequence.branch),
        )

    def _take_in(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._take_in_step(under_way)

    def _take_in_step(self, under_way: _UnderWay) -> None:
        """Wait for the step; its tokens go to those of its sequences that have not ended meanwhile."""
        result, step = under_way.result.result(), under_way.step
        self.scheduler.complete(step)
        tells_speed = not result.was_held_up and not step.scored  # scores take a while that no other step does
        self._account(step, self._clock() - under_way.started_s if tells_speed else None)
        self.counters.num_nan_rows += len(result.nan_rows)
        self._take_in_prompts(step, result)
        for row, (sequence, token) in enumerate(zip(step.sampled, result.token_ids, strict=True)):
            if sequence.status is SequenceStatus.FINISHED:
                continue
            self.counters.num_generation_tokens += 1
            if token is None:
                self._end_row(sequence, row, result)
            elif sequence.request.sampling.beam_width is not None:
                if step.positions[row] == sequence.num_output_tokens:  # else computed again after it was preempted
                    self._search(sequence, result.candidates[row])
            else:
                self._append(sequence, token, result.logprobs.get(row))

    def _end_row(self, sequence: Sequence, row: int, result: StepResult) -> None:
        """No token was drawn."""
        end = result.ends.get(row)
        if end is not None:
            self._finish(sequence, end.reason, end.error, end.param)
        else:
            self._finish(sequence, FinishReason.ERROR, _NAN_ERROR if row in result.nan_rows else _SAMPLING_ERROR)

    def _expire(self, now: float) -> None:
        """End what is late."""
        if not self._deadlines.is_due(now):
            return
        for sequence in self._deadlines.late(self._sequences(), now):
            if sequence.status is SequenceStatus.FINISHED:
                continue  # a beam, with the rest of its search
            if self._deadlines.is_late(sequence, now):
                self._finish(sequence, FinishReason.TIMEOUT)
            else:
                message = f"queue_timeout is {sequence.request.queue_timeout_s:g} s, and the request waited longer"
                self._finish(sequence, FinishReason.OVERLOADED, message)

    def _sequences(self) -> list[Sequence]:
        return [sequence for live in self._live.values() for sequence in live.sequences]

    @property
    def num_prefill_tokens_under_way(self) -> int:
        """Of the step under way, what is not done yet if it goes on at the usual rate."""
        if self._under_way is None:
            return 0
        passed_s = self._clock() - self._under_way.started_s
        return max(0, self._under_way.step.num_prefill_tokens - int(passed_s * self.speed.prefill_tokens_per_s))

    def _account(self, step: ScheduledStep, duration_s: float | None) -> None:
        num_tokens = step.plan.token_ids.size
        self.counters.num_steps += 1
        self.counters.num_computed_tokens += num_tokens
        self.counters.step_tokens.add(num_tokens)
        if duration_s is not None:
            self.speed.note(step.num_prefill_tokens, step.num_decoded, duration_s, step.prefill_context)

    # ---- prompts ----

    def _take_in_prompts(self, step: ScheduledStep, result: StepResult) -> None:
        """What was read of prompts, ahead of the tokens that follow them; those that draw none are over."""
        for read, logprobs in zip(step.scored, result.prompt_logprobs, strict=True):
            if read.sequence.status is not SequenceStatus.FINISHED:
                self._tell_scores(read, logprobs)
        for read, hidden in zip(step.pooled, result.hidden_sums, strict=True):
            if read.sequence.status is not SequenceStatus.FINISHED:
                self._live[read.sequence.request.request_id].add_hidden(hidden)
        for sequence in step.completed:
            if sequence.status is not SequenceStatus.FINISHED:
                self._complete(sequence)

    def _tell_scores(self, read: PromptRead, logprobs: tuple[TokenLogprobs, ...]) -> None:
        sequence = read.sequence
        num_nan_rows = sum(math.isnan(each.logprob) for each in logprobs)
        if num_nan_rows:
            self.counters.num_nan_rows += num_nan_rows
            self._finish(sequence, FinishReason.ERROR, _PROMPT_NAN_ERROR)
            return
        update = SequenceUpdate(
            sequence.request.request_id,
            sequence.branch,
            0,
            (),
            num_cached_tokens=sequence.num_cached_tokens,
            prompt_position=read.position + 1,
            prompt_logprobs=logprobs,
        )
        self._emit(sequence.request.gateway_id, update)

    def _complete(self, sequence: Sequence) -> None:
        """The prompt of a sequence that draws nothing is computed."""
        request = sequence.request
        live = self._live[request.request_id]
        self._note_prefilled(live, sequence)
        if request.pooling is None:
            self._finish(sequence, FinishReason.LENGTH)
            return
        embedding = live.embedding()
        if not np.isfinite(embedding).all():
            self._finish(sequence, FinishReason.ERROR, _PROMPT_NAN_ERROR)
            return
        reason, cached = FinishReason.STOP, sequence.num_cached_tokens
        update = SequenceUpdate(
            request.request_id,
            sequence.branch,
            0,
            (),
            reason,
            cached,
            embedding=embedding.tobytes(),
            phases=live.phases,
        )
        self._emit(request.gateway_id, update)
        self._end(sequence, reason)

    # ---- tokens ----

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        position = len(sequence.token_ids) - sequence.num_prompt_tokens
        sequence.append(token)
        live = self._live[sequence.request.request_id]
        self._note_prefilled(live, sequence)
        reason = _stop_reason(sequence)
        told = () if logprobs is None else (logprobs,)
        phases, live.phases = live.phases, None
        self._send(sequence, sequence.branch, position, (token,), reason, logprobs=told, phases=phases)
        if reason is not None:
            self._end(sequence, reason)

    def _note_prefilled(self, live: LiveRequest, sequence: Sequence) -> None:
        if live.num_cached_tokens is None:
            now = self._clock()
            live.num_cached_tokens = sequence.num_cached_tokens or 0
            live.ttft_s = now - live.received_s
            admitted_s = live.received_s if live.admitted_s is None else live.admitted_s
            live.phases = (admitted_s - live.received_s, now - admitted_s)
            self.counters.prefill_s.add(now - admitted_s)
            self._note(live.progress())

    def _search(self, sequence: Sequence, candidates: tuple[Candidate, ...]) -> None:
        """A beam was computed."""
        live = self._live[sequence.request.request_id]
        self._note_prefilled(live, sequence)
        if live.search is None:
            raise RuntimeError(f"{live.request.request_id} is no beam search")
        is_over = live.search.take(sequence, candidates)
        live.sequences = live.search.beams
        if is_over:
            self._finish_search(live, None)

    def _finish_search(self, live: LiveRequest, reason: FinishReason | None, error: str | None = None) -> None:
        """End a beam search: by itself if ``reason`` is None; at its deadline, with the best of what there is."""
        request, search = live.request, live.search
        found = search.outputs(len(request.branches)) if search and reason in (None, FinishReason.TIMEOUT) else ()
        for number, branch in enumerate(request.branches):
            output = found[number] if number < len(found) else None
            tokens = output.token_ids if output else ()
            ended = reason or (output and output.reason) or FinishReason.LENGTH
            self._send(live.sequences[0], branch.index, 0, tokens, ended, error, phases=live.phases)
            self.counters.finished[ended] += 1
        for sequence in live.sequences:
            self.scheduler.finish(sequence, reason or FinishReason.ABORT)
        longest = max((len(output.token_ids) for output in found), default=0)
        live.num_output_tokens = longest * (request.sampling.beam_width or 1)
        self._forget(live)

    # ---- ends ----

    def _finish(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None, param: str | None = None
    ) -> None:
        """End a sequence without a new token, with the branches that were to be forked from it."""
        live = self._live[sequence.request.request_id]
        if live.search is not None:
            self._finish_search(live, reason, error)
            return
        position = len(sequence.token_ids) - sequence.num_prompt_tokens
        for branch in (sequence.branch, *sequence.unforked_branches):
            self._send(sequence, branch, position, (), reason, error, param)
        self._end(sequence, reason)

    def _send(
        self,
        sequence: Sequence,
        branch: int,
        position: int,
        tokens: tuple[int, ...],
        reason: FinishReason | None,
        error: str | None = None,
        param: str | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        phases: tuple[float, float] | None = None,
    ) -> None:
        request, cached = sequence.request, sequence.num_cached_tokens
        retry_after_s = None
        if reason is FinishReason.OVERLOADED:
            retry_after_s = self.speed.retry_after_s(self.scheduler.num_uncomputed_prompt_tokens)
        update = SequenceUpdate(
            request.request_id,
            branch,
            position,
            tokens,
            reason,
            cached,
            error,
            retry_after_s,
            param,
            logprobs=logprobs,
            phases=phases,
        )
        self._emit(request.gateway_id, update)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        live = self._live[sequence.request.request_id]
        self.counters.finished[reason] += 1 + len(sequence.unforked_branches)
        live.num_output_tokens += len(sequence.token_ids) - sequence.num_prompt_tokens
        self.scheduler.finish(sequence, reason)
        live.sequences.remove(sequence)
        if not live.sequences:
            self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        del self._live[live.request.request_id]
        if live.num_cached_tokens is not None:
            self.counters.decode_s.add(self._clock() - live.received_s - live.ttft_s)
        self._note(live.progress(finished=True))

    # ---- what can be seen ----

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._under_way is not None

    @property
    def in_flight(self) -> Future[StepResult] | None:
        """What the step under way will give."""
        return self._under_way.result if self._under_way else None

    @property
    def step_under_way(self) -> ScheduledStep | None:
        """The step that was launched and not yet taken in."""
        return self._under_way.step if self._under_way else None

    @property
    def largest_step_s(self) -> float:
        """What a step with as many tokens as there may be is expected to take; 0.0 when unknown."""
        limits = self.scheduler.limits
        return self.speed.expected_step_s(limits.max_num_batched_tokens, limits.max_num_seqs)

    @property
    def plan_at_s(self) -> float:
        """When to call ``step`` next, if the step under way is not over before: not too early, since what arrives
        after it was planned is not in it. 0.0 when nothing is under way."""
        if self._under_way is None:
            return 0.0
        step = self._under_way.step
        expected_s = self.speed.expected_step_s(step.num_prefill_tokens, step.num_decoded, step.prefill_context)
        return self._under_way.started_s + expected_s - 2 * self._planning_s - _PLANNING_MARGIN_S

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
        sequences = self._sequences()
        if any(sequence.status is SequenceStatus.FINISHED for sequence in sequences):
            raise RuntimeError("a sequence has ended and is still counted as under way")
        num_scheduled = self.scheduler.num_running + self.scheduler.num_waiting
        if len(sequences) != num_scheduled:
            raise RuntimeError(f"{len(sequences)} sequences are under way, but {num_scheduled} run or wait")
        self._deadlines.check(sequences)


def _stop_reason(sequence: Sequence) -> FinishReason | None:
    """Why the sequence ends with the tokens that it has now, or None; never without output."""
    sampling = sequence.request.sampling
    num_output_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
    if num_output_tokens == 0:
        return None
    if num_output_tokens > sampling.min_tokens and sequence.token_ids[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    if num_output_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None
