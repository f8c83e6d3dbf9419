"""Requests that arrive together with one prefix that nobody has computed yet: how much prefill they cost.

    python tests/bench/shared_prefix.py [--requests 64] [--prefix-tokens 1008] [--own-tokens 32] [--budget 2048]
                                        [--real-model] [--model FOLDER] [--dtype float32] [--threads N]

Computed once, the prefix costs ``prefix``, and each request its own tokens; that is the least. The tokens are counted
in the plans. Each request asks for one token. Without ``--real-model`` a stub carries out the plans.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time

from fake_executor import BLOCK_SIZE, ORDINARY_TOKEN, FakeExecutor, hasher

from octavo.worker.engine import Engine
from octavo.worker.messages import Request, SamplingParams, SequenceUpdate
from octavo.worker.scheduler import Scheduler, SchedulerLimits

MOST_RATIO = 1.1


def main() -> None:
    args = parse_args()
    total = args.prefix_tokens + args.own_tokens + 1
    num_blocks = args.requests * (total // BLOCK_SIZE + 2)
    if args.real_model:
        engine, conditions = real_engine(args, num_blocks, total)
    else:
        engine, conditions = fake_engine(args, num_blocks, total), {"model": "none"}
    started = time.perf_counter()
    for index in range(args.requests):
        engine.submit(request(args, index))
    while engine.step():
        pass
    seconds = time.perf_counter() - started
    engine.check()
    conditions |= {
        "requests": args.requests,
        "prefix_tokens": args.prefix_tokens,
        "own_tokens": args.own_tokens,
        "budget": args.budget,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    report(args, engine, conditions, seconds)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prefix-tokens", type=int, default=1_008)
    parser.add_argument("--own-tokens", type=int, default=32)
    parser.add_argument("--budget", type=int, default=2_048, help="tokens of a step")
    parser.add_argument("--real-model", action="store_true")
    parser.add_argument("--model", help="folder; default: the embedded one")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


def request(args: argparse.Namespace, index: int) -> Request:
    prompt = (*[ORDINARY_TOKEN] * args.prefix_tokens, 1_000 + index, *[ORDINARY_TOKEN] * (args.own_tokens - 1))
    return Request(str(index), "gateway", "bench", prompt, b"", SamplingParams(1, seed=1, temperature=0.0))


def ignore(gateway_id: str, update: SequenceUpdate) -> None:
    """What is generated does not matter here."""


def fake_engine(args: argparse.Namespace, num_blocks: int, max_model_len: int) -> Engine:
    limits = SchedulerLimits(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=args.requests,
        max_num_batched_tokens=args.budget,
        max_model_len=max_model_len,
        plans_ahead=True,
    )
    executor = FakeExecutor()
    return Engine(Scheduler(limits, hasher()), executor, clock=executor.clock, emit=ignore)


def real_engine(args: argparse.Namespace, num_blocks: int, max_model_len: int) -> tuple[Engine, dict[str, object]]:
    from in_process import Bench, find_model, make_spec  # torch is loaded only where it is needed

    model_dir = find_model(args)
    spec = make_spec(
        model_dir,
        args.dtype,
        max_num_seqs=args.requests,
        max_num_batched_tokens=args.budget,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
    )
    bench = Bench.load(spec, model_dir)
    return bench.engine(ignore), bench.conditions()


def report(args: argparse.Namespace, engine: Engine, conditions: dict[str, object], seconds: float) -> None:
    least = args.prefix_tokens + args.requests * args.own_tokens
    computed, counters = engine.counters.num_computed_tokens, engine.scheduler.counters
    unshared = args.requests * (args.prefix_tokens + args.own_tokens)
    print(
        f"{computed} tokens computed, {computed / least:.3f} × the least of {least} (wanted at most {MOST_RATIO}); "
        f"without sharing {unshared}"
    )
    print(
        f"{counters.num_prefix_waits} waited for one that was computing their prefix, {engine.counters.num_steps} steps"
    )
    figures = {
        "computed_tokens": computed,
        "ratio": computed / least,
        "prefix_waits": counters.num_prefix_waits,
        "steps": engine.counters.num_steps,
        "seconds": round(seconds, 3),
    }
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    print(json.dumps({"conditions": conditions, "figures": figures}))


if __name__ == "__main__":
    main()
