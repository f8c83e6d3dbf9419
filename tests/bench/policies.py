"""The router's policies, and the published rules of other routers, on one trace at several loads.

    python tests/bench/policies.py --trace mooncake_trace.jsonl --jobs 2

A load is a share of the saturation of ``cost``: of the speed, relative to the trace's own, from which on requests come
faster than they are served. Above it the backlog grows as long as the trace lasts, so that a share of all requests
still waits for its first token when the last one arrives. The speed at which that share reaches 5 % is found by
bisection. ``--saturation`` gives it instead.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from in_process import processor
from tqdm import tqdm

from octavo.router.policies import POLICIES
from octavo.router.simulator.group import GroupConfig
from octavo.router.simulator.hardware import SETUPS
from octavo.router.simulator.metrics import Result
from octavo.router.simulator.policies import Policy, RouterPolicy
from octavo.router.simulator.simulation import Simulation, SimulationConfig
from octavo.router.simulator.trace_files import read_trace
from octavo.router.simulator.traces import Trace

sys.path.insert(0, str(Path(__file__).parents[1] / "simulator"))

from published_rules import RULES

WAITING_SHARE = 0.05
"""Of the requests, that waits for its first token at the end of the trace: at the saturation."""
SPEED_ACCURACY = 0.03


@dataclass(frozen=True)
class Run:
    """One simulation, in a process of its own."""

    config: SimulationConfig
    trace: Trace
    policy: str
    load: float
    slo_ttft_s: float
    slo_itl_s: float

    def figures(self) -> dict[str, Any]:
        begin = time.perf_counter()
        result = simulate(self.config, self.trace, self.policy)
        figures = result.figures(self.slo_ttft_s, self.slo_itl_s)
        return figures | {"load": self.load, "policy": self.policy, "wall_s": time.perf_counter() - begin}


def simulate(config: SimulationConfig, trace: Trace, policy: str) -> Result:
    return Simulation(config, trace, new_policy(policy)).run()


def new_policy(name: str) -> Callable[[random.Random], Policy]:
    return RULES[name] if name in RULES else functools.partial(RouterPolicy, name)  # type: ignore[arg-type]


def main() -> None:
    args = parse_arguments()
    trace, config = read_trace(args.trace), make_config(args)
    trace = trace if args.num_requests is None else trace.first(args.num_requests)
    saturation = args.saturation or find_saturation(config, trace, args.lowest_speed, args.highest_speed)
    print(f"saturation of cost: {saturation:.3g} times the trace's speed", flush=True)
    runs = [
        Run(config, trace.faster(saturation * load), policy, load, args.slo_ttft, args.slo_itl)
        for load in args.loads
        for policy in args.policies
    ]
    show(args, trace, saturation, run_all(runs, args.jobs))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*POLICIES, *RULES]
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--num-requests", type=int, help="only the first so many")
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--kv-tokens", type=int, default=3_000_000, help="room for KV in a group")
    parser.add_argument("--setup", choices=SETUPS, default="h100-8b")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.7, 0.9], help="shares of the saturation")
    parser.add_argument("--policies", nargs="+", choices=names, default=names)
    parser.add_argument("--saturation", type=float, help="speed, where it is known")
    parser.add_argument("--lowest-speed", type=float, default=0.25)
    parser.add_argument("--highest-speed", type=float, default=64.0)
    parser.add_argument("--slo-ttft", type=float, default=2.0)
    parser.add_argument("--slo-itl", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="simulations at once")
    return parser.parse_args()


def make_config(args: argparse.Namespace) -> SimulationConfig:
    num_blocks, step_times = args.kv_tokens // args.block_size, SETUPS[args.setup].step_times()
    return SimulationConfig(
        args.groups, GroupConfig(num_blocks, args.block_size, 256, 8192, step_times), seed=args.seed
    )


def find_saturation(config: SimulationConfig, trace: Trace, low: float, high: float) -> float:
    """Bisects the logarithm of the speed, which is taken to be between ``low`` and ``high``."""
    while high / low > 1.0 + SPEED_ACCURACY:
        speed = (low * high) ** 0.5
        share = waiting_share(simulate(config, trace.faster(speed), "cost"))
        print(f"speed {speed:.3g}: {share:.1%} wait when the last request comes", flush=True)
        low, high = (speed, high) if share < WAITING_SHARE else (low, speed)
    return (low * high) ** 0.5


def waiting_share(result: Result) -> float:
    """Of the requests, that had no token yet when the last one came."""
    last_s = result.arrivals_s[-1]
    waiting = [not outcome.first_token_s <= last_s for outcome in result.outcomes]
    return sum(waiting) / len(waiting)


def run_all(runs: Sequence[Run], num_jobs: int) -> list[dict[str, Any]]:
    with ProcessPoolExecutor(num_jobs) as executor:
        futures = [executor.submit(run.figures) for run in runs]
        for _ in tqdm(as_completed(futures), total=len(futures), unit=" simulations", disable=None):
            pass
    return [future.result() for future in futures]


def show(args: argparse.Namespace, trace: Trace, saturation: float, rows: list[dict[str, Any]]) -> None:
    print(
        f"{trace.name}, {len(trace.requests)} requests, {args.groups} groups of {args.kv_tokens} tokens, {args.setup}"
    )
    print(f"an infinite cache would find {trace.infinite_cache_hit_rate():.3f} of the blocks")
    print("load  policy           block hits  max/mean prefill  TTFT mean / p99, s  ITL mean / p99, ms  goodput  busy")
    for row in rows:
        ttft, itl = row["ttft_s"], row["itl_s"]
        print(
            f"{row['load']:4.0%}  {row['policy']:15s}  {row['block_hit_rate']:10.3f}  {row['imbalance']:16.2f}"
            f"  {ttft['mean']:7.3f} / {ttft['p99']:8.3f}  {1e3 * itl['mean']:7.1f} / {1e3 * itl['p99']:8.1f}"
            f"  {row['goodput']:7.1%}  {row['utilisation']:4.0%}"
        )
    conditions = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    conditions |= {"machine": processor(), "saturation": saturation}
    print(json.dumps({"conditions": conditions, "figures": rows}))


if __name__ == "__main__":
    main()
