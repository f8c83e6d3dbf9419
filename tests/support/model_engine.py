"""An engine over a real model: the scheduler as a test wants it, and what its requests were given. And a tiny model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from packed_model import tiny_llama
from transformers import LlamaForCausalLM

from octavo.kernels.backend import Kernels, select_kernels
from octavo.worker.collectives import SingleProcess
from octavo.worker.engine import Engine
from octavo.worker.executor import Executor
from octavo.worker.messages import FinishReason, Request, RequestProgress, SequenceUpdate, TokenLogprobs
from octavo.worker.model_runner import ModelRunner
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.sampling_state import MatcherOf
from octavo.worker.scheduler import Scheduler, SchedulerLimits

CPU = torch.device("cpu")

Group = tuple[ModelRunner, Executor]


@dataclass
class Given:
    """What one branch of a request was given, all updates joined."""

    num_tokens_before: int = 0
    """Its output elsewhere."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    embedding: NDArray[np.float32] | None = None
    reason: FinishReason | None = None
    error: str | None = None
    param: str | None = None
    num_cached_tokens: int | None = None

    def take(self, update: SequenceUpdate) -> None:
        assert self.reason is None, "an update after the end"
        if update.prompt_logprobs:
            assert not self.token_ids, "a prompt's log-probability after an output token"
            assert update.prompt_position == 1 + len(self.prompt_logprobs), "a gap, or a repeat"
            self.prompt_logprobs += update.prompt_logprobs
        assert update.position == self.num_tokens_before + len(self.token_ids)
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs
        if update.embedding is not None:
            self.embedding = np.frombuffer(update.embedding, "<f4")
        self.reason, self.error, self.param = update.finish_reason, update.error, update.param
        self.num_cached_tokens = update.num_cached_tokens


class ModelEngine:
    """Starts with nothing cached; its blocks hold NaN, so that reading what was never written shows."""

    def __init__(
        self,
        group: Group,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        budget: int = 256,
        caching: bool = True,
        plans_ahead: bool = False,
        matcher_of: MatcherOf | None = None,
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
        self.engine = Engine(
            Scheduler(scheduler, hasher), executor, clock=lambda: 0.0, emit=self._emit, matcher_of=matcher_of
        )

    def _emit(self, gateway_id: str, update: SequenceUpdate) -> None:
        self.given[update.request_id, update.branch].take(update)

    def of(self, request_id: str, branch: int = 0) -> Given:
        return self.given[request_id, branch]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.step()
            self.engine.check()
            self.progress |= {each.request_id: each for each in self.engine.drain_progress()}

    def run(self, *requests: Request) -> dict[tuple[str, int], Given]:
        """Until all that was submitted has ended; then nothing is held any more. What these requests were given, by
        request and branch."""
        branches = {(request.request_id, branch.index): branch for request in requests for branch in request.branches}
        self.given |= {key: Given(len(branch.output_token_ids)) for key, branch in branches.items()}
        for request in requests:
            self.engine.submit(request)
        while self.engine.has_work:
            self.step()
        scheduler = self.engine.scheduler
        assert scheduler.pool.num_free_blocks == scheduler.limits.num_blocks
        assert self.engine.num_requests == 0
        return {key: self.given[key] for key in branches}


class TinyModel:
    """A random Llama, in transformers and here."""

    def __init__(self, folder: Path) -> None:
        self.reference: LlamaForCausalLM = tiny_llama()
        self.reference.save_pretrained(folder)
        self.kernels: Kernels = select_kernels(CPU)
        self.runner = ModelRunner.load(
            folder,
            rank=0,
            size=1,
            device=CPU,
            dtype=torch.float32,
            collectives=SingleProcess(),
            block_size=4,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_model_len=64,
            kernels=self.kernels,
        )

    @contextmanager
    def engine(
        self, *, num_blocks: int = 128, plans_ahead: bool = True, overlaps: bool = False, **how: Any
    ) -> Iterator[ModelEngine]:
        """``overlaps``: tokens are waited for in another thread, as on a GPU; the others are ModelEngine's."""
        self.runner.allocate_kv(num_blocks)
        executor = Executor(self.runner, SingleProcess(), self.kernels, overlaps=overlaps)
        try:
            yield ModelEngine((self.runner, executor), num_blocks=num_blocks, plans_ahead=plans_ahead, **how)
        finally:
            executor.shut_down()
