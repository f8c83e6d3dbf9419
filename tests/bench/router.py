"""Cost of the router's operations: hashing, matching, deciding, taking in events; memory of an index entry.

    python tests/bench/router.py [--entries 1000000] [--groups 64]

The index holds prompts of 512, 8,192 and 65,536 tokens in blocks of 16, each held whole by one group and in part by
three more; lookups are for prompts that leave a stored one at a random block. Times are the lower quartile of repeated
runs in one process. How fast the machine was meanwhile is told by ``loop_ns``: one turn of an empty loop that adds
integers (about 30 ns on an idle server core). The last line is JSON.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click
import numpy as np

from octavo.router.config import RouterConfig
from octavo.router.counters import Counters
from octavo.router.index import PrefixIndex
from octavo.router.knowledge import GroupKnowledge
from octavo.router.predictions import Predictions
from octavo.router.router import Router
from octavo.worker.messages import BlocksStored, GroupReport, KVEvents, RouteQueries, RouteQuery
from octavo.worker.routing_hash import HashArray, RoutingHasher, pack_hashes
from octavo.worker.wire import pack, unpack

BLOCK_SIZE = 16
LENGTHS = (512, 8192, 65536)
HASHER = RoutingHasher(bytes(range(32)), BLOCK_SIZE)


def lower_quartile(run: Callable[[], object], repeats: int = 30) -> float:
    """Seconds of one run."""
    times = []
    for _ in range(repeats):
        times.append(timed(run))
    return statistics.quantiles(times, n=4)[0]


def random_hashes(rng: np.random.Generator, count: int) -> HashArray:
    return rng.integers(0, 1 << 64, count, dtype=np.uint64)


def fill(
    index: PrefixIndex, slots: Sequence[int], num_blocks: int, rng: np.random.Generator
) -> tuple[list[HashArray], list[tuple[float, int, float]]]:
    """Prompts of all lengths; each is held whole by one group and to random depths by three more. Also for each call
    that stored some: its seconds, its blocks, and the index's bytes for each block that is in it."""
    prompts, calls, total = [], [], 0
    while total < num_blocks:
        prompt = random_hashes(rng, int(rng.choice(LENGTHS)) // BLOCK_SIZE)
        prompts.append(prompt)
        total += len(prompt)
        for number, slot in enumerate(rng.choice(slots, min(4, len(slots)), replace=False).tolist()):
            held = prompt if number == 0 else prompt[: rng.integers(len(prompt))]
            seconds = timed(partial(index.stored, slot, held))
            calls.append((seconds, len(held), index.num_bytes / total))
    return prompts, calls


def held_out(prompts: Sequence[HashArray], num_blocks: int, rng: np.random.Generator) -> HashArray:
    """A prompt that leaves a stored one at a random block."""
    long_enough = [prompt for prompt in prompts if len(prompt) >= num_blocks]
    stored, shared = long_enough[rng.integers(len(long_enough))], int(rng.integers(num_blocks))
    return np.concatenate((stored[:shared], random_hashes(rng, num_blocks - shared)))


def bench_hash() -> dict[str, float]:
    rng, results = np.random.default_rng(0), {}
    for length in LENGTHS:
        tokens = rng.integers(0, 128_000, length).astype(np.int32)
        seconds = lower_quartile(partial(HASHER.hash_blocks, tokens))
        results[f"hash_us_per_block_{length}"] = seconds / (length // BLOCK_SIZE) * 1e6
        results[f"hash_us_{length}"] = seconds * 1e6
    state, block = HASHER.start(), list(range(BLOCK_SIZE))
    results["extend_us"] = lower_quartile(lambda: HASHER.extend(state, block), 1000) * 1e6
    return results


def bench_index(num_blocks: int, num_groups: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    index = PrefixIndex(1 << 40)
    slots = [index.add_slot() for _ in range(num_groups)]
    prompts, calls = fill(index, slots, num_blocks, rng)
    late = calls[len(calls) // 2 :]
    results = {
        "blocks": float(sum(map(len, prompts))),
        "rows": float(index.num_entries),
        "bytes_per_block_at_most": max(num_bytes for _, _, num_bytes in late),
        "bytes_per_block_in_the_end": calls[-1][2],
        "fill_blocks_per_s": sum(count for _, count, _ in calls) / sum(seconds for seconds, _, _ in calls),
        "fill_call_max_ms": max(seconds for seconds, _, _ in late) * 1e3,
    }
    for length in LENGTHS:
        queries = [held_out(prompts, length // BLOCK_SIZE, rng) for _ in range(200)]
        for name, find in (("match", index.match), ("depths", index.depths)):
            results[f"{name}_us_{length}"] = lower_quartile(partial(for_each, find, queries)) / len(queries) * 1e6
        tokens = rng.integers(0, 128_000, length).astype(np.int32)
        seconds = lower_quartile(lambda tokens=tokens: index.match(HASHER.hash_blocks(tokens)), 200)  # type: ignore[misc]
        results[f"hash_and_match_us_{length}"] = seconds * 1e6
    return results | bench_predictions(index, prompts, rng) | bench_changes(index, slots, rng)


def bench_predictions(index: PrefixIndex, prompts: Sequence[HashArray], rng: np.random.Generator) -> dict[str, float]:
    """Assuming a prompt of 65,536 tokens and dropping it, beside 100 others."""
    predictions = Predictions(100.0)
    for number in range(100):
        predictions.assume(str(number), number % 64, held_out(prompts, 4096, rng), 0.0)
    prompt = held_out(prompts, 4096, rng)
    return {
        "assume_us_65536": lower_quartile(lambda: predictions.assume("a", 0, prompt, 0.0)) * 1e6,
        "match_assumed_us_65536": lower_quartile(lambda: index.match(prompt, None, predictions)) * 1e6,
    }


def bench_changes(index: PrefixIndex, slots: Sequence[int], rng: np.random.Generator) -> dict[str, float]:
    """Blocks per second into and out of the full index, how long a snapshot of 100,000 blocks in chains of 64 takes,
    and how long a group takes to vanish and to be swept."""
    fresh = [random_hashes(rng, 512) for _ in range(200)]
    count = 200 * 512
    store = timed(partial(for_each, partial(index.stored, slots[0]), fresh))
    share = timed(partial(for_each, partial(index.stored, slots[1]), fresh))
    remove = timed(partial(for_each, partial(index.removed, slots[0]), fresh))
    remove += timed(partial(for_each, partial(index.removed, slots[1]), fresh))
    chains = tuple(BlocksStored(None, pack_hashes(random_hashes(rng, 64))) for _ in range(100_000 // 64))
    knowledge = GroupKnowledge(1, index, Predictions(1.0), Counters(), 1.0)
    snapshot = timed(lambda: knowledge.apply(KVEvents(1, 0, chains, is_snapshot=True)))
    vanish = timed(lambda: index.remove_slot(slots[-1]))
    sweeps = []
    while not index.sweep(0):
        sweeps.append(timed(lambda: index.sweep(4096)))
    index.check()
    return {
        "stored_new_blocks_per_s": count / store,
        "stored_shared_blocks_per_s": count / share,
        "removed_blocks_per_s": 2 * count / remove,
        "snapshot_100000_ms": snapshot * 1e3,
        "remove_slot_us": vanish * 1e6,
        "sweep_total_ms": sum(sweeps) * 1e3,
        "sweep_step_max_ms": max(sweeps) * 1e3,
    }


def for_each(function: Callable[[Any], object], items: Sequence[Any]) -> None:
    for item in items:
        function(item)


def timed(run: Callable[[], object]) -> float:
    """Seconds that this thread had a processor."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def bench_route(num_entries: int, num_groups: int) -> dict[str, float]:
    rng = np.random.default_rng(1)
    router = Router(RouterConfig(max_index_bytes=1 << 40), random.Random(1))
    for number in range(num_groups):
        router.report(group_report(number), 0.0)
    slots = [group.slot for group in router.pools["m"].groups.values()]
    prompts, _ = fill(router.index, slots, num_entries, rng)
    results = {}
    for length in LENGTHS:
        hashes = [pack_hashes(held_out(prompts, length // BLOCK_SIZE, rng)) for _ in range(100)]
        queries = [RouteQuery(f"{length}-{n}", "m", value, length, 256) for n, value in enumerate(hashes)]
        singles = [RouteQueries("g", (query,)) for query in queries]
        undo = RouteQueries("g", (), cancelled=tuple(query.request_id for query in queries))
        times = []
        for _ in range(8):
            times.append(timed(partial(for_each, partial(router.route, now=1.0), singles)))
            router.route(undo, 1.0)
        results[f"route_us_{length}"] = min(times) / len(queries) * 1e6
        results[f"unpack_us_{length}"] = lower_quartile(partial(unpack, pack(singles[0]), RouteQueries)) * 1e6
    return results


def group_report(number: int) -> GroupReport:
    return GroupReport(
        model="m",
        group=f"group-{number}",
        generation=number + 1,
        block_size=BLOCK_SIZE,
        num_blocks=100_000,
        num_free_blocks=50_000,
        max_num_seqs=256,
        num_running=number % 50,
        num_waiting=0,
        num_uncomputed_prompt_tokens=number * 100,
        prefill_tokens_per_s=20_000.0,
        decode_step_s=0.01,
        draining=False,
        progress=(),
        events=(KVEvents(number + 1, 0, ()),),
    )


def loop_ns() -> float:
    total, start = 0, time.perf_counter()
    for number in range(1_000_000):
        total += number
    return (time.perf_counter() - start) * 1e3


@click.command()
@click.option("--entries", default=1_000_000, show_default=True)
@click.option("--groups", default=64, show_default=True)
def main(entries: int, groups: int) -> None:
    conditions: dict[str, Any] = {
        "benchmark": "router",
        "entries": entries,
        "groups": groups,
        "block_size": BLOCK_SIZE,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "loop_ns": round(loop_ns(), 1),
    }
    results = bench_hash() | bench_index(entries, groups) | bench_route(entries, groups)
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    for name, value in results.items():
        print(f"{name:32} {value:14,.3f}")
    print(json.dumps(conditions | {name: round(value, 4) for name, value in results.items()}))


if __name__ == "__main__":
    main()
