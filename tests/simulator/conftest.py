"""Small clusters and made-up traces."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest

from octavo.router.policies import PolicyName
from octavo.router.simulator.group import GroupConfig
from octavo.router.simulator.policies import Policy, RouterPolicy
from octavo.router.simulator.simulation import Simulation, SimulationConfig
from octavo.router.simulator.step_times import StepTimes
from octavo.router.simulator.traces import Trace, TraceRequest

STEP_TIMES = StepTimes(overhead_s=0.003, weights_s=0.005, token_s=1e-4, context_s=1e-7, kv_s=2e-6)
TRACE_BLOCK_SIZE = 8
NewPolicy = Callable[[random.Random], Policy]


def random_trace(rng: random.Random, num_requests: int, *, rate: float = 20.0, most_output: int = 60) -> Trace:
    """Conversations: each request goes on where one before it of the same conversation ended, or starts another."""
    requests: list[TraceRequest] = []
    conversations: list[list[int]] = []
    now, num_ids = 0.0, 0
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        if not conversations or rng.random() < 0.3:
            conversations.append([])
        ids = rng.choice(conversations)
        num_new = rng.randint(1, 6)
        ids += range(num_ids, num_ids + num_new)
        num_ids += num_new
        num_prompt = TRACE_BLOCK_SIZE * (len(ids) - 1) + rng.randint(1, TRACE_BLOCK_SIZE)
        requests.append(TraceRequest(now, num_prompt, rng.randint(1, most_output), tuple(ids)))
        if len(ids) > 20:
            conversations.remove(ids)
    return Trace("random", TRACE_BLOCK_SIZE, tuple(requests))


@pytest.fixture(scope="session")
def make_trace() -> Callable[..., Trace]:
    return random_trace


@pytest.fixture(scope="session")
def new_simulation() -> Callable[..., Simulation]:
    def create(
        trace: Trace, policy: NewPolicy | PolicyName = "cost", *, num_groups: int = 2, **fields: object
    ) -> Simulation:
        group = {
            "num_blocks": 1000,
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "step_times": STEP_TIMES,
        }
        others = {name: fields.pop(name) for name in list(fields) if name.startswith(("report", "submit", "faults"))}
        config = SimulationConfig(num_groups, GroupConfig(**(group | fields)), **others)  # type: ignore[arg-type]
        new_policy = functools.partial(RouterPolicy, policy) if isinstance(policy, str) else policy
        return Simulation(config, trace, new_policy)

    return create
