"""How long a stream stands still when its worker group is lost: from the fault to the next token, at another group.

    python tests/bench/recovery.py [--rounds 5] [--fault SIGSTOP …]

The cluster of ``tests/support/chaos.py``: three groups of two ranks of the embedded model over two Ray nodes on this
machine. Nine streams run when a process is killed or stopped; those of the groups that are gone afterwards are the ones
that had to move. Their time includes the prefill of what they had so far, under 150 tokens.

    SIGKILL of a leader, of a rank      target: p50 under 1 s plus prefill
    SIGSTOP of a rank, of a leader      target: 5 s; and for a node whose Ray is killed

The last line is JSON: seconds by fault.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import click
import httpx2 as httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import chaos
from serve_client import wait_until_idle

FAULTS = (
    "SIGKILL of a leader",
    "SIGKILL of a rank",
    "SIGSTOP of a rank",
    "SIGSTOP of a leader",
    "SIGKILL of a raylet",
)
NUM_STREAMS = 9
MAX_TOKENS = 120
FAULT_AT = 20
"""Tokens that every stream has when the fault comes."""


@dataclass
class Watched:
    """A stream, and when its tokens came."""

    group: str = ""
    times: list[float] = field(default_factory=list)

    def standstill_s(self, moment: float) -> float:
        """Of a stream that moved: seconds from ``moment`` to the first token of the other group; 0.0 if none came.

        Its own group's last step may still have been under way: what comes within a usual gap counts as that. Not the
        longest gap: one of a second or two follows, in all streams, when a new group starts on the same cores.
        """
        before = [at for at in self.times if at <= moment]
        usual = statistics.median(after - earlier for earlier, after in itertools.pairwise(before))
        return next((at - moment for at in self.times if at > moment + usual), 0.0)


def groups(cluster: chaos.Cluster) -> set[str]:
    text = httpx.get(f"{cluster.server.url}/metrics", timeout=30).text
    return set(re.findall(r'octavo_num_requests_running\{group="([^"]+)"', text))


def follow(cluster: chaos.Cluster, number: int, ready: threading.Semaphore) -> Watched:
    """One stream to its end."""
    watched = Watched()
    with cluster.client.completions.with_streaming_response.create(
        model=cluster.server.model,
        prompt=f"Story number {number}: the lighthouse keeper",
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as response:
        watched.group = response.headers["x-octavo-group"]
        for _ in response.parse():
            watched.times.append(time.monotonic())
            if len(watched.times) == FAULT_AT:
                ready.release()
    return watched


def recoveries(cluster: chaos.Cluster, fault: str, chance: random.Random) -> list[float]:
    """Of the streams that had to move in one round."""
    cluster.wait_for_groups()
    before, ready = groups(cluster), threading.Semaphore(0)
    strike = cluster.prepared(fault, chance)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        streams = [threads.submit(follow, cluster, number, ready) for number in range(NUM_STREAMS)]
        for _ in streams:
            ready.acquire(timeout=120)
        moment = time.monotonic()
        strike()
        watched = [stream.result(300) for stream in streams]
    cluster.wait_for_groups()
    wait_until_idle(cluster.server)
    lost = before - groups(cluster)
    return [each.standstill_s(moment) for each in watched if each.group in lost]


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return {"n": len(values), "p50_s": round(statistics.median(ordered), 2), "p99_s": round(p99, 2)}


@click.command(help=__doc__)
@click.option("--rounds", default=5, show_default=True, help="of each fault")
@click.option("--fault", multiple=True, help="only faults whose name holds this")
@click.option("--seed", default=1, show_default=True)
def main(rounds: int, fault: tuple[str, ...], seed: int) -> None:
    chance, found = random.Random(seed), dict[str, dict[str, float]]()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, embedded model, {NUM_STREAMS} streams")
    with chaos.cluster() as cluster:
        for name in (name for name in FAULTS if not fault or any(part in name for part in fault)):
            times = [each for _ in range(rounds) for each in recoveries(cluster, name, chance)]
            if times:
                found[name] = quantiles(times)
                print(f"{name:22s} {found[name]}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
