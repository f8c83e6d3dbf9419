"""How many requests a second the control plane takes, with hundreds of worker groups that compute nothing.

    python tests/bench/control_plane.py [--groups 200] [--seconds 15] [--profile]

The real proxy, gateway, router and Ray Serve; leaders with the real engine, scheduler and prefix cache, in a few
processes, whose steps take as long as those of Llama-3.1-8B on an H100 each. Chats behind 50 system prompts of 200
tokens come at one rate after another, from a generator on the same machine, until fewer are answered than come, or the
first token takes over a second for one in a hundred.

    CPU ms      that the processes of each kind spend on a request, beyond what they spend while nothing comes
    cores       that they are busy in all
    limit       requests a second at which the one gateway, the one router or the proxy alone would fill a core, by the
                CPU that a request takes at the highest rate that was kept up with

Groups and generator share the machine's cores with what is measured; on real machines they have their own.
``--profile`` adds where the gateway and the router hold their interpreter's lock, at half of the highest rate. The last
line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import click
from stream_processes import profiled

from octavo.cluster.load.datasets import DatasetOptions, workload_of
from octavo.cluster.load.load import Load, perform
from octavo.cluster.load.processes import KINDS, processes_of, spent_s
from octavo.cluster.load.progress import Progress
from octavo.cluster.load.served import Served, served
from octavo.cluster.load.target import ENDPOINTS, Server

RATES = (25, 50, 75, 100, 125, 150, 200, 250, 300, 400)
KEPT_UP, MOST_TTFT_S = 0.95, 1.0
ALONE = ("gateway", "router", "proxy")
"""Kinds with one process that has to take every request."""


@dataclass(frozen=True)
class Step:
    """One rate."""

    rate: float
    answered_per_s: float
    num_failed: int
    ttft_p50_s: float
    ttft_p99_s: float
    cores: Mapping[str, float]
    generator_cores: float

    @property
    def is_kept_up_with(self) -> bool:
        return self.answered_per_s >= KEPT_UP * self.rate and self.ttft_p99_s <= MOST_TTFT_S and not self.num_failed


def cores(pid: int, before: Mapping[str, float], seconds: float) -> dict[str, float]:
    return {kind: (spent - before.get(kind, 0.0)) / seconds for kind, spent in spent_s(pid).items()}


def idle_cores(server: Served, seconds: float) -> dict[str, float]:
    before = spent_s(server.pid)
    time.sleep(seconds)
    return cores(server.pid, before, seconds)


def step(server: Served, load: Load, rate: float, seconds: float) -> Step:
    """``rate`` for so long; the CPU is counted from the first request to the last answer."""
    load = replace(load, rate=rate, num_scripts=round(rate * seconds), seed=round(rate), server=Server(server.url, {}))
    before, begin = spent_s(server.pid), time.monotonic()
    run = asyncio.run(perform(load, Progress(1, is_hidden=True))).runs[0]
    spent = cores(server.pid, before, time.monotonic() - begin)
    times = sorted(sample.ttft_s for sample in run.good())
    return Step(
        rate,
        len(times) / run.wall_s,
        len(run.samples) - len(times),
        times[len(times) // 2],
        times[int(0.99 * len(times))],
        spent,
        run.cpu_s / run.wall_s,
    )


def report(steps: list[Step], idle: Mapping[str, float]) -> dict[str, Any]:
    kinds = [kind for kind in KINDS if kind in idle]
    print(
        f"{'rate':>6} {'answered/s':>10} {'TTFT p50, p99 s':>16}  CPU ms a request: {', '.join(kinds)}; generator cores"
    )
    for each in steps:
        told = "  ".join(f"{1e3 * (each.cores[kind] - idle[kind]) / each.answered_per_s:.2f}" for kind in kinds)
        times = f"{each.ttft_p50_s:.3f} {each.ttft_p99_s:.3f}"
        print(f"{each.rate:6.0f} {each.answered_per_s:10.1f} {times:>16}  {told}; {each.generator_cores:.2f}")
    print("cores while nothing comes:", ", ".join(f"{kind} {idle[kind]:.2f}" for kind in kinds))
    best = max((each for each in steps if each.is_kept_up_with), key=lambda each: each.rate, default=steps[0])
    limits = {
        kind: (1.0 - idle[kind]) * best.answered_per_s / max(1e-9, best.cores[kind] - idle[kind]) for kind in ALONE
    }
    print(f"kept up with: {best.rate:.0f}/s; one process alone would fill a core at", end=" ")
    print(", ".join(f"{kind} {limit:.0f}/s" for kind, limit in limits.items()))
    return {
        "kept up with": best.rate,
        "limits": limits,
        "idle cores": dict(idle),
        "steps": [vars(each) for each in steps],
    }


def show_profiles(server: Served, load: Load, rate: float, seconds: int) -> None:
    for kind in ("gateway", "router"):
        pid = next(process.pid for each, process in processes_of(server.pid) if each == kind)
        with profiled(pid, seconds) as found:
            step(server, load, rate, seconds)
        print(f"who holds the {kind}'s GIL at {rate:.0f}/s:")
        print("\n".join(found[0].lines(20)))


@click.command(help=__doc__)
@click.option("--groups", default=200)
@click.option("--seconds", default=15)
@click.option("--profile", is_flag=True)
def main(groups: int, seconds: int, profile: bool) -> None:
    lengths = {"num_prefixes": 50, "prefix_len": 200, "input_len": 32, "output_len": 8}
    workload = workload_of("prefix_repetition", DatasetOptions(**lengths))
    load = Load(
        server=Server("", {}), model=None, endpoint=ENDPOINTS[0], fields={"ignore_eos": True}, workload=workload
    )
    steps: list[Step] = []
    with served(["--fake-engine", "h100-8b", "--replicas", str(groups)]) as server:
        step(server, load, RATES[0], 4)  # prefixes are cached then, and code is warm
        idle = idle_cores(server, 10)
        for rate in RATES:
            steps.append(step(server, load, rate, seconds))
            if not steps[-1].is_kept_up_with:
                break
        conditions = {"groups": groups, "seconds": seconds, **lengths, "cores": os.cpu_count()}
        conditions |= {"load": round(os.getloadavg()[0], 1), "python": platform.python_version()}
        print(", ".join(f"{name} {value}" for name, value in conditions.items()))
        figures = report(steps, idle)
        if profile:
            show_profiles(server, load, figures["kept up with"] / 2, seconds)
    print(json.dumps({"conditions": conditions, "figures": figures}))


if __name__ == "__main__":
    main()
