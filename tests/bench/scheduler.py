"""How long planning a step takes, and how many operations a second the block pool does.

    python tests/bench/scheduler.py [--steps 300]

Planning: N sequences of mixed lengths decode, prefix cache on; timed is ``Scheduler.plan`` alone, which includes
building the StepPlan. The executor is a stub that gives every sequence a token, so that about one sequence in
``block_size`` fills a block in every step. Cases:

    decoding       each step is over before the next one is planned; nobody waits
    ahead          each step is planned while the one before it is under way
    no slot        ahead, and 10,000 requests wait; the batch is full
    no memory      ahead, and 10,000 wait; the first of them is larger than what is left of the pool
    urgent         like "no memory", and the first one is more urgent than half of what runs, which would not be enough

Pool: take and give back blocks of a full pool whose blocks are all findable, so that every allocation evicts. One
operation is one ``allocate``, ``share`` or ``release``. Flat means that the smallest pool is not much faster than the
largest; what is left of a difference is the processor's cache.

All times are CPU time of the one thread that works, so that a busy machine matters less.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from dataclasses import dataclass

from octavo.worker.block_pool import BlockPool
from octavo.worker.messages import Request, SamplingParams
from octavo.worker.plan_builder import ScheduledStep
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.sequence import Sequence

BLOCK_SIZE = 16
POOL_SIZES = (1_000, 10_000, 100_000, 1_000_000)
TABLE_BLOCKS = 32
TABLE_BLOCKS_AT_MOST = 64
"""Of a sequence, in the pool that planning is timed with."""


@dataclass(frozen=True)
class Case:
    name: str
    plans_ahead: bool = True
    num_waiting: int = 0
    has_slots: bool = False
    first_is_urgent: bool = False


CASES = (
    Case("decoding", plans_ahead=False),
    Case("ahead"),
    Case("no slot", num_waiting=10_000),
    Case("no memory", num_waiting=10_000, has_slots=True),
    Case("urgent", num_waiting=10_000, has_slots=True, first_is_urgent=True),
)


def planning_times_ms(case: Case, num_sequences: int, num_steps: int) -> list[float]:
    """Milliseconds of each ``plan`` while ``num_sequences`` decode."""
    scheduler = _busy_scheduler(case, num_sequences)
    _let_wait(scheduler, case, num_sequences)
    times: list[float] = []
    under_way: ScheduledStep | None = None
    for _ in range(num_steps):
        started = time.thread_time()
        step = _planned(scheduler.plan())
        times.append(1_000 * (time.thread_time() - started))
        if step.plan.slots.size != num_sequences:
            raise RuntimeError(f"{num_sequences} sequences should decode, but {step.plan.slots.size} do")
        if under_way is not None:
            _sample(scheduler, under_way)
        under_way = step
        if not case.plans_ahead:
            _sample(scheduler, step)
            under_way = None
        scheduler.drain_events()
    return times


def _busy_scheduler(case: Case, num_sequences: int) -> Scheduler:
    """All prompts computed, every sequence decoding, no step under way."""
    rng = random.Random(0)
    limits = SchedulerLimits(
        num_blocks=TABLE_BLOCKS_AT_MOST * num_sequences,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_sequences + (64 if case.has_slots else 0),
        max_num_batched_tokens=8_192,
        max_model_len=1_024,
        plans_ahead=case.plans_ahead,
    )
    scheduler = Scheduler(limits, RoutingHasher(bytes(16), BLOCK_SIZE))
    for arrival in range(num_sequences):
        prompt = tuple(rng.randrange(32_000) for _ in range(rng.randint(16, 400)))
        scheduler.add(_sequence(prompt, arrival, priority=arrival % 2))
    while scheduler.num_waiting or any(sequence.num_uncomputed_tokens > 1 for sequence in scheduler.running):
        _sample(scheduler, _planned(scheduler.plan()))
    scheduler.drain_events()
    return scheduler


def _sequence(prompt: tuple[int, ...], arrival: int, *, priority: int) -> Sequence:
    sampling = SamplingParams(max_tokens=600, seed=0)
    request = Request(str(arrival), "gateway", "model", prompt, b"", sampling, priority=priority)
    return Sequence.start(request, [0], (), arrival=arrival, now=0.0)


def _let_wait(scheduler: Scheduler, case: Case, num_sequences: int) -> None:
    """The first one fits into an empty pool, but not beside what runs; the others are short."""
    num_tokens = scheduler.limits.num_blocks * BLOCK_SIZE * 19 // 20
    for index in range(case.num_waiting):
        prompt = (40_000 + index, *[7] * (num_tokens if index == 0 else 99))
        priority = 0 if index == 0 and case.first_is_urgent else 1
        scheduler.add(_sequence(prompt, num_sequences + index, priority=priority))


def _planned(step: ScheduledStep | None) -> ScheduledStep:
    if step is None:
        raise RuntimeError("there was nothing to plan")
    return step


def _sample(scheduler: Scheduler, step: ScheduledStep) -> None:
    scheduler.complete(step)
    for sequence in step.sampled:
        sequence.append(7)


def pool_operations_per_s(num_blocks: int, num_operations: int = 400_000) -> float:
    """Tables of 32 blocks are taken, shared once and released twice; all of the pool is cached at first."""
    pool = BlockPool(num_blocks)
    for block in [pool.allocate() for _ in range(num_blocks)]:
        pool.set_findable(block)
        pool.release(block)
    num_rounds = num_operations // (4 * TABLE_BLOCKS)
    started = time.thread_time()
    for _ in range(num_rounds):
        table = [pool.allocate() for _ in range(TABLE_BLOCKS)]
        for block in table:
            pool.set_findable(block)
            pool.share(block)
        pool.release_all(table)
        pool.release_all(table)
    return 4 * TABLE_BLOCKS * num_rounds / (time.thread_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps timed for each number of sequences")
    steps = parser.parse_args().steps
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, block size {BLOCK_SIZE}")
    planning = {case.name: {count: show_planning(case, count, steps) for count in (256, 1_024)} for case in CASES}
    pool = {}
    for num_blocks in POOL_SIZES:
        pool[num_blocks] = round(statistics.median(pool_operations_per_s(num_blocks) for _ in range(3)))
        print(f"pool of {num_blocks:9,} blocks: {pool[num_blocks] / 1e6:.2f} M operations/s")
    slowdown = pool[POOL_SIZES[0]] / pool[POOL_SIZES[-1]]
    print(f"an operation takes {slowdown:.2f} × as long with {POOL_SIZES[-1]:,} blocks as with {POOL_SIZES[0]:,}")
    figures = {"plan_median_ms": planning, "pool_operations_per_s": pool, "pool_slowdown": slowdown, "steps": steps}
    print(json.dumps(figures))


def show_planning(case: Case, num_sequences: int, num_steps: int) -> float:
    """The median, in ms."""
    times = planning_times_ms(case, num_sequences, num_steps)
    median, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
    print(f"plan {num_sequences:5}, {case.name:9}: median {median:.3f} ms, p99 {p99:.3f} ms", flush=True)
    return round(median, 3)


if __name__ == "__main__":
    main()
