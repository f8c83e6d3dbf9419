"""ClusterGeneration: one request with its branches, over as many worker groups as it takes.

A request that loses its worker group goes on at another one: prompt and output so far are submitted again, nothing
that was delivered changes, and the tokens that follow are those that the first group would have given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..worker.errors import Overloaded, Unavailable
from ..worker.messages import Branch, FinishReason, Request, RouteDecision, SequenceUpdate, TokenLogprobs
from .api.model_metrics import ModelsMetrics
from .api.service import GenerationRequest, Route, RouteWishes, TokenDelta
from .group_line import GroupLine
from .suspicion import Suspicion
from .token_stream import FIRST_PROMPT_POSITION, GroupLost, TokenStream, nobody

ROUTE_PATIENCE_S = 30.0
"""How long a request whose group died waits for another one, and a new one for the first."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request is now."""

    decision: RouteDecision
    client: GroupLine
    stream: TokenStream
    queued_s: float
    """Seconds that it waited in the router's queue before."""
    weights: str = ""
    """Those of the group; see ``GroupReport``."""


@dataclass(frozen=True, slots=True)
class Past:
    """What has become of a request, as far as it matters for where it goes on."""

    dead: tuple[int, ...] = ()
    """Generations of the groups that it has lost."""
    weights: str = ""
    """What its output so far was computed with: nothing else may go on with it. Empty: there is none."""
    is_suspect: bool = False
    """See ``suspicion.py``."""


class Placer(Protocol):
    """Who finds a group for a request."""

    metrics: ModelsMetrics

    async def submit(self, request: Request, wishes: RouteWishes, past: Past, patience_s: float) -> Placement:
        """Raises Unavailable or Overloaded."""
        ...

    def is_draining(self, generation: int) -> bool:
        """That group was about to end in order, as far as is known."""
        ...

    def acquit(self, request_id: str) -> None:
        """The request is no suspect any more, or has left its group."""
        ...

    def ended(self, generation: ClusterGeneration) -> None:
        """A request that had been placed is over; told once."""
        ...


@dataclass(slots=True)
class ClusterGeneration:
    """One request under way, over as many groups as it takes."""

    service: Placer
    request: Request
    wishes: RouteWishes
    deadline_s: float | None
    """On the event loop's clock, as ``arrival_s``."""
    arrival_s: float
    outputs: dict[int, list[int]] = field(init=False)
    """The output so far of each branch that has not ended."""
    past: Past = Past()
    suspicion: Suspicion = field(default_factory=Suspicion)
    placement: Placement | None = None
    cached_told: bool = False
    num_branches: int = field(init=False)
    num_output_tokens: int = 0
    """Of the longest branch."""
    next_prompt_position: int = FIRST_PROMPT_POSITION
    """Of the prompt's tokens, how likely those before it were has been told."""
    is_over: bool = False
    _wake: Callable[[], None] = nobody
    _moving: asyncio.Task[TokenDelta | None] | None = None
    """While it looks for another group."""

    def __post_init__(self) -> None:
        self.outputs = {branch.index: [] for branch in self.request.branches}
        self.num_branches = len(self.outputs)

    @property
    def route(self) -> Route:
        placement = self._placed()
        decision = placement.decision
        return Route(
            decision.group or "",
            decision.expected_cached_tokens,
            decision.reason,
            decision.expected_ttft_s,
            placement.queued_s,
            self.request.attempt,
        )

    async def place(self) -> None:
        """Submit what there is to a group. Raises Unavailable or Overloaded."""
        remaining_s = self._remaining_s()
        limits_s = [limit for limit in (remaining_s, self.request.queue_timeout_s) if limit is not None]
        patience_s = min([ROUTE_PATIENCE_S, *limits_s])
        self.request = replace(self.request, timeout_s=remaining_s)
        self.placement = await self.service.submit(self.request, self.wishes, self.past, patience_s)
        self.placement.stream.listen(self._wake)

    def listen(self, wake: Callable[[], None]) -> None:
        """``wake`` is called whenever there may be something to take."""
        self._wake = wake
        self._placed().stream.listen(wake)

    def take(self) -> Sequence[TokenDelta]:
        """New tokens of all branches; after the last of a group that was lost it begins to move to another one."""
        if self._moving is not None:
            if not self._moving.done():
                return ()
            moved, self._moving = self._moving, None
            if (failure := moved.result()) is not None:
                return self._all_ended(failure)
        stream = self._placed().stream
        deltas = [delta for update in stream.take() if (delta := self._take(update)) is not None]
        if stream.loss is not None and self.outputs:
            self._moving = asyncio.create_task(self._move(stream.loss))
            self._moving.add_done_callback(lambda _: self._wake())
        return deltas

    def _all_ended(self, end: TokenDelta) -> Sequence[TokenDelta]:
        """All branches end so."""
        self._end()
        branches = list(self.outputs)
        self.outputs.clear()
        return [end._replace(branch=branch) for branch in branches]

    def _take(self, update: SequenceUpdate) -> TokenDelta | None:
        """None where it says nothing that has not been said."""
        output = self.outputs.get(update.branch)
        if output is None:  # it was ended here, or before a beam search began again
            return None
        output += update.token_ids
        if len(output) > self.num_output_tokens:
            self.num_output_tokens = len(output)
        if self.past.is_suspect and self.suspicion.is_disproved(self.num_output_tokens):
            self.past = replace(self.past, is_suspect=False)
            self.service.acquit(self.request.request_id)
        if update.finish_reason is not None:
            self._end_branch(update.branch)
        told = self._prompt_once(update) if update.prompt_logprobs else ()
        if not (update.token_ids or told or update.finish_reason is not None):
            return None
        return TokenDelta(
            update.token_ids,
            update.finish_reason,
            None if self.cached_told else self._cached_once(update),
            update.error,
            update.branch,
            update.retry_after_s,
            update.param,
            update.code,
            update.logprobs,
            told,
            update.embedding,
            update.phases,
        )

    def _end_branch(self, branch: int) -> None:
        """The group has ended it."""
        del self.outputs[branch]
        if not self.outputs:
            self._placed().client.forget(self.request.request_id)
            self._end()

    def _prompt_once(self, update: SequenceUpdate) -> tuple[TokenLogprobs, ...]:
        """What it says of the prompt and no group before has said."""
        told = self.next_prompt_position - update.prompt_position
        fresh = update.prompt_logprobs[told:]
        self.next_prompt_position += len(fresh)
        return fresh

    def _cached_once(self, update: SequenceUpdate) -> int | None:
        """Told with the first delta; those of another branch or a later group would count a prompt twice."""
        self.cached_told = update.num_cached_tokens is not None
        return update.num_cached_tokens

    async def _move(self, loss: GroupLost) -> TokenDelta | None:
        """Go on at another group; how the branches end when that fails."""
        self._note(loss)
        if self.suspicion.is_proved:
            message = f"{self.suspicion.num_lost} worker groups were lost while they worked on this request"
            return TokenDelta((), FinishReason.ERROR, error=message)
        self.service.metrics[self.request.model].failovers.inc()
        self.request = self._continuation()
        try:
            await self.place()
        except (Unavailable, Overloaded) as error:
            return self._not_moved(error)
        return None

    def _note(self, loss: GroupLost) -> None:
        """What the loss of a group means for the next one."""
        placement, past = self._placed(), self.past
        generation = placement.client.generation
        self.service.acquit(self.request.request_id)
        if not (loss.is_dead and self.service.is_draining(generation)):
            self.suspicion.group_lost(self.num_output_tokens)
        self.past = Past(
            (*past.dead, generation) if loss.is_dead else past.dead,
            past.weights or (placement.weights if self._has_begun else ""),
            self.suspicion.is_suspect,
        )

    def _not_moved(self, error: Unavailable | Overloaded) -> TokenDelta:
        """How the branches end that found no other group. When it was the request's own time that ran out, what there
        is by then is the answer."""
        if self._remaining_s() == 0.0:
            return TokenDelta((), FinishReason.TIMEOUT)
        if isinstance(error, Unavailable):
            return TokenDelta((), FinishReason.ABORT, error=str(error))
        return TokenDelta((), FinishReason.OVERLOADED, error=str(error), retry_after_s=error.retry_after_s)

    def _continuation(self) -> Request:
        """The request for the next group: the branches that have not ended, each from where it stopped.

        A beam search has given nothing before its end, and begins again with all of its outputs. Once there is output
        the request has had its turn in a queue, and no limit of it ends what the client has begun to read.
        """
        request = replace(self.request, attempt=self.request.attempt + 1)
        if request.sampling.beam_width is not None:
            return request
        branches = tuple(Branch(index, tuple(output)) for index, output in self.outputs.items())
        queue_timeout_s = None if self._has_begun else request.queue_timeout_s
        return replace(request, branches=branches, queue_timeout_s=queue_timeout_s)

    @property
    def _has_begun(self) -> bool:
        """There is output, or something was told of the prompt: the client may have read it."""
        is_told = self.next_prompt_position > FIRST_PROMPT_POSITION
        return self.num_output_tokens > 0 or len(self.outputs) < self.num_branches or is_told

    def _remaining_s(self) -> float | None:
        """What is left of the request's time."""
        if self.deadline_s is None:
            return None
        return max(0.0, self.deadline_s - asyncio.get_running_loop().time())

    def _placed(self) -> Placement:
        if self.placement is None:
            raise RuntimeError("the request has not been placed")
        return self.placement

    def end(self, branch: int) -> None:
        """Stop one branch; with the last one the request. Harmless when it is over."""
        if branch not in self.outputs:
            return
        del self.outputs[branch]
        if self.outputs:
            self._placed().client.abort_branch(self.request.request_id, branch)
        else:
            self.abort()

    def abort(self) -> None:
        """Free what the request holds; harmless when it is over."""
        self.outputs.clear()
        if self._moving is not None:
            self._moving.cancel()
            self._moving = None
        if self.placement is not None:
            self.placement.client.abort(self.request.request_id)
            self._end()

    def _end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.service.ended(self)


def wire_request(request: GenerationRequest, gateway_id: str, routing_hashes: bytes) -> Request:
    """What a worker group is sent: all branches, without output yet."""
    return Request(
        request_id=request.request_id,
        gateway_id=gateway_id,
        model=request.model,
        prompt_token_ids=request.prompt_token_ids,
        routing_hashes=routing_hashes,
        sampling=request.sampling,
        branches=tuple(Branch(index) for index in range(request.num_branches)),
        priority=request.priority,
        timeout_s=request.timeout_s,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        use_prefix_cache=request.use_prefix_cache,
        queue_timeout_s=request.queue_timeout_s,
        pooling=request.pooling,
        trace=request.trace,
        client_request_id=request.client_request_id,
    )
