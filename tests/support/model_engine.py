"""An engine over a real model: the scheduler as a test wants it, and what its requests were given."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.worker.engine import Engine
from octavo.worker.executor import Executor
from octavo.worker.messages import FinishReason, Request, RequestProgress, SequenceUpdate, TokenLogprobs
from octavo.worker.model_runner import ModelRunner
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.scheduler import Scheduler, SchedulerLimits


@dataclass
class Given:
    """What one branch of a request was given, all updates joined."""

    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    embedding: NDArray[np.float32] | None = None
    reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int | None = None

    def take(self, update: SequenceUpdate) -> None:
        assert self.reason is None, "an update after the end"
        if update.prompt_logprobs:
            assert not self.token_ids, "a prompt's log-probability after an output token"
            assert update.prompt_position == 1 + len(self.prompt_logprobs), "a gap, or a repeat"
            self.prompt_logprobs += update.prompt_logprobs
        assert update.position == len(self.token_ids)
        self.token_ids += update.token_ids
        if update.embedding is not None:
            self.embedding = np.frombuffer(update.embedding, "<f4")
        self.reason, self.error, self.num_cached_tokens = update.finish_reason, update.error, update.num_cached_tokens


class ModelEngine:
    """Starts with nothing cached; its blocks hold NaN, so that reading what was never written shows."""

    def __init__(
        self,
        group: tuple[ModelRunner, Executor],
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        budget: int = 256,
        caching: bool = True,
        plans_ahead: bool = False,
    ) -> None:
        runner, executor = group
        runner.kv_pool.data.fill_(float("nan"))
        limits = runner.limits
        assert num_blocks <= runner.kv_pool.data.shape[2]
        scheduler = SchedulerLimits(
            num_blocks, limits.block_size, max_num_seqs, budget, limits.max_model_len, caching, plans_ahead
        )
        hasher = RoutingHasher(bytes(16), limits.block_size)
        self.given: dict[tuple[str, int], Given] = defaultdict(Given)
        self.progress: dict[str, RequestProgress] = {}
        self.engine = Engine(Scheduler(scheduler, hasher), executor, clock=lambda: 0.0, emit=self._emit)

    def _emit(self, gateway_id: str, update: SequenceUpdate) -> None:
        self.given[update.request_id, update.branch].take(update)

    def of(self, request_id: str, branch: int = 0) -> Given:
        return self.given[request_id, branch]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.step()
            self.engine.check()
            self.progress |= {each.request_id: each for each in self.engine.drain_progress()}

    def run(self, *requests: Request) -> None:
        """Until all that was submitted has ended; then nothing is held any more."""
        for request in requests:
            self.engine.submit(request)
        while self.engine.has_work:
            self.step()
        scheduler = self.engine.scheduler
        assert scheduler.pool.num_free_blocks == scheduler.limits.num_blocks
        assert self.engine.num_requests == 0
