"""The engine of a worker group, for what its ranks can hold. No torch here: a group need not compute anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from .engine import Engine, StepExecutor
from .grammar import GrammarCompiler
from .messages import SequenceUpdate
from .policies import make_queue
from .routing_hash import RoutingHasher
from .scheduler import Scheduler, SchedulerLimits
from .spec import WorkerSpec
from .speed import SpeedMeter
from .token_budget import FixedBudget, LatencyBudget, TokenBudget


class LoadedGroup(Protocol):
    """What the ranks of a group found out when they came up; the same for all of them."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def weights(self) -> str:
        """See ``name_of_weights``."""

    @property
    def grammars(self) -> GrammarCompiler: ...


def engine_of(
    spec: WorkerSpec,
    loaded: LoadedGroup,
    executor: StepExecutor,
    emit: Callable[[str, SequenceUpdate], None],
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    limits = SchedulerLimits(
        num_blocks=loaded.num_blocks,
        block_size=spec.block_size,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_model_len=loaded.max_model_len,
        enable_prefix_caching=spec.enable_prefix_caching,
        plans_ahead=spec.async_scheduling,
    )
    speed = SpeedMeter()
    scheduler = Scheduler(
        limits,
        RoutingHasher(spec.routing_key, spec.block_size),
        queue=make_queue(spec.scheduling_policy, aging_s=spec.priority_aging_s),
        budget=_budget(spec, speed),
    )
    return Engine(scheduler, executor, clock=clock, emit=emit, speed=speed, matcher_of=loaded.grammars.matcher)


def _budget(spec: WorkerSpec, speed: SpeedMeter) -> TokenBudget:
    most = spec.max_num_batched_tokens
    if spec.target_itl_s is None:
        return FixedBudget(most)
    return LatencyBudget(most, spec.target_itl_s, speed, least=spec.block_size)
