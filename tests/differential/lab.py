"""Lab: the real model, loaded once, and engines of any shape on its weights: in this process, float32, without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import platformdirs

from octavo.kernels.backend import Kernels
from octavo.worker.engine import Engine
from octavo.worker.executor import Executor
from octavo.worker.group_engine import engine_of
from octavo.worker.messages import FinishReason, Request, SequenceUpdate
from octavo.worker.model_runner import Limits, ModelRunner
from octavo.worker.rank import LoadedRank, executor_of, load_alone
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.sampling_row import SamplingRow, StepResult
from octavo.worker.spec import SchedulingPolicy, WorkerSpec
from octavo.worker.step_plan import StepPlan

BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
ROUTING_KEY = b"a key for tests!"


@dataclass(frozen=True)
class Setup:
    """What an engine is given."""

    num_blocks: int
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    async_scheduling: bool = False
    scheduling_policy: SchedulingPolicy = "priority"


ROOMY = Setup(num_blocks=160, enable_prefix_caching=False)
"""Nothing is shared between requests, evicted or preempted: how a request runs alone."""


@dataclass
class Delivered:
    """What a gateway got of one branch. ``token_ids`` begins with what the branch had before."""

    request: Request
    branch: int
    token_ids: list[int]
    num_given: int
    reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    ended_after: int = 0
    """Requests that had been submitted when it ended."""

    def take(self, update: SequenceUpdate) -> None:
        assert self.reason is None, f"{update} came after the end"
        assert update.position == len(self.token_ids), f"{update} leaves a gap or repeats: {len(self.token_ids)} known"
        assert update.error is None, update.error
        self.token_ids.extend(update.token_ids)
        self.reason = update.finish_reason
        self.num_cached_tokens = update.num_cached_tokens


@dataclass
class WatchedExecutor:
    """Hands plans on, and counts what can be seen only there."""

    executor: Executor
    num_planned_ahead: int = 0
    """Steps that were planned before the tokens of the step before them were known."""
    num_prompt_chunks: int = 0
    """Parts of prompts that were not the last."""

    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        self.num_planned_ahead += plan.tokens_from_step is not None
        self.num_prompt_chunks += plan.slots.size - len(set(plan.logit_indices.tolist()))
        return self.executor.launch(plan, rows)


@dataclass
class Session:
    """An engine, and all that it delivered, by request and branch."""

    executor: WatchedExecutor
    engine: Engine = field(init=False)
    delivered: dict[tuple[str, int], Delivered] = field(default_factory=dict)
    num_submitted: int = 0

    def submit(self, request: Request) -> None:
        self.num_submitted += 1
        for branch in request.branches:
            given = list(branch.output_token_ids)
            self.delivered[request.request_id, branch.index] = Delivered(request, branch.index, given, len(given))
        self.engine.submit(request)

    def emit(self, gateway_id: str, update: SequenceUpdate) -> None:
        delivered = self.delivered[update.request_id, update.branch]
        delivered.take(update)
        delivered.ended_after = self.num_submitted

    def run(self) -> None:
        """Until all that was submitted has ended."""
        while self.engine.step():
            self.engine.check()
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing is under way: nothing is held."""
        self.engine.check()
        scheduler = self.engine.scheduler
        assert self.engine.num_requests == scheduler.num_queued_requests == scheduler.num_queued_tokens == 0
        assert scheduler.pool.num_free_blocks == scheduler.limits.num_blocks, "blocks are held by nobody"
        assert all(each.reason is not None for each in self.delivered.values()), "a branch never ended"


class Lab:
    """Weights are shared by all runners; each has KV blocks of its own."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self._spec = WorkerSpec(
            model=str(model_dir),
            served_model_name="model",
            group="tests",
            generation=1,
            tensor_parallel_size=1,
            device="cpu",
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_num_seqs=8,
            max_num_batched_tokens=MAX_MODEL_LEN,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=None,
            gpu_memory_utilization=0.9,
            num_gpu_blocks_override=MAX_MODEL_LEN // BLOCK_SIZE,
            num_ranks_on_machine=1,
            routing_key=ROUTING_KEY,
            cache_dir=platformdirs.user_cache_path("octavo"),
            router_names=(),
            ray_namespace="none",
            startup_timeout_s=600.0,
        )
        self._loaded = load_alone(model_dir, self._spec)
        self.hasher = RoutingHasher(ROUTING_KEY, BLOCK_SIZE)

    @property
    def kernels(self) -> Kernels:
        return self._loaded.kernels

    def runner(self, num_blocks: int, *, max_num_seqs: int, max_num_batched_tokens: int) -> ModelRunner:
        """Its blocks hold NaN: reading what was never written cannot go unnoticed."""
        known = self._loaded.runner
        limits = Limits(BLOCK_SIZE, max_num_seqs, max_num_batched_tokens, MAX_MODEL_LEN)
        num_kv_heads = known.config.num_kv_heads
        runner = ModelRunner(known.model, known.config, limits, known.placement, self.kernels, num_kv_heads)
        runner.allocate_kv(num_blocks)
        runner.kv_pool.data.fill_(float("nan"))
        return runner

    @contextmanager
    def session(self, setup: Setup) -> Iterator[Session]:
        """An engine of this shape. Its clock counts calls, so that a run can be repeated exactly."""
        runner = self.runner(
            setup.num_blocks,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
        )
        spec = replace(
            self._spec,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            enable_prefix_caching=setup.enable_prefix_caching,
            async_scheduling=setup.async_scheduling,
            scheduling_policy=setup.scheduling_policy,
        )
        loaded: LoadedRank = replace(self._loaded, runner=runner, num_blocks=setup.num_blocks)
        executor, ticks = executor_of(loaded), count()
        session = Session(WatchedExecutor(executor))
        session.engine = engine_of(
            spec,
            loaded,
            session.executor,  # type: ignore[arg-type]  # all that the engine asks for is ``launch``
            session.emit,
            clock=lambda: float(next(ticks)),
        )
        try:
            yield session
        finally:
            executor.shut_down()
