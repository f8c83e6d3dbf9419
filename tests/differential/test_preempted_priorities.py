"""Priorities in a pool that is too small: the urgent come first, at the cost of what was planned in the same step."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from fake_rank import VOCABULARY, FakeRank

from octavo.worker.engine import Engine
from octavo.worker.messages import FinishReason, Request, SamplingParams, SequenceUpdate
from octavo.worker.plan_builder import PlanBuilder
from octavo.worker.policies import make_queue
from octavo.worker.routing_hash import RoutingHasher, pack_hashes
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.sequence import Sequence

NUM_ROUNDS = 20
BLOCK_SIZE = 4
NUM_BLOCKS = 110
HASHER = RoutingHasher(bytes(16), BLOCK_SIZE)
URGENT = "urgent "
MOST_STEPS = 80
"""Until an urgent request has ended. Five prompts take 32 and share them with the decodes, of which those that were
preempted too often do not give way; the low ones take 150 and more."""


class Run:
    """Twenty long decodes of low priority, and five urgent prompts at random moments."""

    def __init__(self, seed: int) -> None:
        rng = Random(seed)
        self.limits = SchedulerLimits(
            NUM_BLOCKS,
            BLOCK_SIZE,
            max_num_seqs=12,
            max_num_batched_tokens=16,
            max_model_len=256,
            plans_ahead=seed % 2 == 0,
        )
        self.low = [self._request(f"low {i}", rng, 5, 60, priority=2**62 if seed % 4 == 0 else 10) for i in range(20)]
        self.urgent = [
            self._request(f"{URGENT}{i}", rng, 100, 4, priority=-(2**62) if seed % 3 == 0 else 0) for i in range(5)
        ]
        self.arrivals = dict(zip(rng.sample(range(5, 90), len(self.urgent)), self.urgent, strict=True))
        self.outputs: dict[str, list[int]] = {}
        self.ended_at: dict[str, int] = {}
        self.num_steps = 0
        self.engine = engine_on(self.limits, self.emit, eager=seed % 5 > 0)

    @staticmethod
    def _request(name: str, rng: Random, num_tokens: int, max_tokens: int, priority: int) -> Request:
        prompt = tuple(rng.choices(range(VOCABULARY), k=num_tokens))
        hashes = pack_hashes(HASHER.hash_blocks(prompt))
        return Request(name, "", "model", prompt, hashes, SamplingParams(max_tokens, seed=1), priority=priority)

    def emit(self, gateway_id: str, update: SequenceUpdate) -> None:
        output = self.outputs.setdefault(update.request_id, [])
        assert update.position == len(output)
        output.extend(update.token_ids)
        if update.finish_reason is not None:
            assert update.finish_reason is FinishReason.LENGTH
            self.ended_at[update.request_id] = self.num_steps

    def serve(self) -> None:
        for request in self.low:
            self.engine.submit(request)
        while self.engine.has_work or any(moment >= self.num_steps for moment in self.arrivals):
            if self.num_steps in self.arrivals:
                self.engine.submit(self.arrivals[self.num_steps])
            self.engine.step()
            self.engine.check()
            self.num_steps += 1


def engine_on(limits: SchedulerLimits, emit: object, *, eager: bool = True) -> Engine:
    rank = FakeRank(limits, eager=eager)
    rank.scheduler = Scheduler(limits, HASHER, queue=make_queue("priority"))
    return Engine(rank.scheduler, rank, clock=lambda: 0.0, emit=emit)  # type: ignore[arg-type]


def output_alone(request: Request) -> list[int]:
    output: list[int] = []
    limits = SchedulerLimits(64, BLOCK_SIZE, 1, 256, 256, enable_prefix_caching=False)
    engine = engine_on(limits, lambda _, update: output.extend(update.token_ids))
    engine.submit(request)
    while engine.step():
        pass
    return output


@pytest.fixture
def taken_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of those that were preempted in a step that they had tokens in already."""
    names: list[str] = []
    remove = PlanBuilder.remove

    def noting(self: PlanBuilder, sequence: Sequence) -> int:
        num_tokens = remove(self, sequence)
        if num_tokens:
            names.append(sequence.request.request_id)
        return num_tokens

    monkeypatch.setattr(PlanBuilder, "remove", noting)
    return names


def test_urgent_requests_come_first_and_change_no_output(taken_out: list[str]) -> None:
    """Case BUG-077: also with the least and the greatest priority that there is room for."""
    for seed in range(NUM_ROUNDS):
        run = Run(seed)
        run.serve()
        for request in run.low + run.urgent:
            assert run.outputs[request.request_id] == output_alone(request)
        last = max(run.ended_at[request.request_id] for request in run.low)
        for moment, request in run.arrivals.items():
            ended = run.ended_at[request.request_id]
            assert ended - moment <= MOST_STEPS, (seed, moment, ended)
            assert ended < last
        assert run.engine.scheduler.counters.num_preemptions > 0
        assert run.engine.scheduler.pool.num_free_blocks == run.limits.num_blocks
    assert len(taken_out) >= NUM_ROUNDS // 2
    assert not any(name.startswith(URGENT) for name in taken_out), "there was always somebody less urgent"
