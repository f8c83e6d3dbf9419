"""How long planning a step takes, and how many operations a second the block pool does.

    python tests/bench/scheduler.py [--steps 300]

Planning: N sequences of mixed lengths decode, each in a slot of its own, prefix cache on; timed is ``Scheduler.plan``
alone, which includes building the StepPlan. The executor is a stub that gives every sequence a token, so that about
one sequence in ``block_size`` fills a block in every step.

Pool: take and give back blocks of a full pool whose blocks are all findable, so that every allocation evicts. One
operation is one ``allocate``, ``share`` or ``release``.

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

from octavo.worker.block_pool import BlockPool
from octavo.worker.messages import Branch, Request, SamplingParams
from octavo.worker.plan_builder import ScheduledStep
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.sequence import Sequence

BLOCK_SIZE = 16
POOL_SIZES = (1_000, 10_000, 100_000, 1_000_000)
TABLE_BLOCKS = 32


def planning_times_ms(num_sequences: int, num_steps: int) -> list[float]:
    """Milliseconds of each ``plan`` while ``num_sequences`` decode."""
    scheduler = _busy_scheduler(num_sequences)
    times = []
    for _ in range(num_steps):
        started = time.thread_time()
        step = scheduler.plan()
        times.append(1_000 * (time.thread_time() - started))
        _sample(_planned(step))
        scheduler.drain_events()
    return times


def _busy_scheduler(num_sequences: int) -> Scheduler:
    """All prompts computed, every sequence decoding."""
    rng = random.Random(0)
    limits = SchedulerLimits(
        num_blocks=64 * num_sequences,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=8_192,
        max_model_len=1_024,
    )
    scheduler = Scheduler(limits, RoutingHasher(bytes(16), BLOCK_SIZE))
    for arrival in range(num_sequences):
        prompt = tuple(rng.randrange(32_000) for _ in range(rng.randint(16, 400)))
        request = Request(str(arrival), "gateway", "model", prompt, (), SamplingParams(max_tokens=600, seed=0))
        scheduler.add(Sequence.start(request, Branch(0), arrival=arrival, now=0.0))
    while scheduler.num_waiting or any(sequence.num_uncomputed_tokens > 1 for sequence in scheduler.running):
        _sample(_planned(scheduler.plan()))
    scheduler.drain_events()
    return scheduler


def _planned(step: ScheduledStep | None) -> ScheduledStep:
    if step is None:
        raise RuntimeError("there was nothing to plan")
    return step


def _sample(step: ScheduledStep) -> None:
    for sequence in step.sampled:
        sequence.token_ids.append(7)


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
    planning = {}
    for num_sequences in (256, 1_024):
        times = planning_times_ms(num_sequences, steps)
        planning[num_sequences] = round(statistics.median(times), 3)
        p99 = statistics.quantiles(times, n=100)[98]
        print(f"plan {num_sequences:5} decoding: median {planning[num_sequences]:.3f} ms, p99 {p99:.3f} ms")
    pool = {}
    for num_blocks in POOL_SIZES:
        pool[num_blocks] = round(statistics.median(pool_operations_per_s(num_blocks) for _ in range(3)))
        print(f"pool of {num_blocks:9,} blocks: {pool[num_blocks] / 1e6:.2f} M operations/s")
    print(json.dumps({"plan_median_ms": planning, "pool_operations_per_s": pool, "steps": steps}))


if __name__ == "__main__":
    main()
