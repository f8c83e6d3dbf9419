"""What routing by prefix is worth: ``cost`` against ``round_robin``, two CPU groups that hold 5 of 8 prefixes each.

    python tests/bench/affinity.py [--requests 200] [--blocks 340] [--clients 24]

Requests of 32 tokens behind one of 8 beginnings of 1,000 tokens, 32 tokens out. Each policy has a cluster of its own
and two loads with prompts of their own: as many requests at once as there are clients, which is its saturation; and
80 % of what ``cost`` kept up with there, as a Poisson process. Prefill tokens and times to the first token are compared
in the latter, throughput in the former. With the defaults it takes 8 minutes on two cores.

The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
from dataclasses import replace
from typing import Any

import click

from octavo.cluster.load.affinity import Trial, measure
from octavo.cluster.load.datasets import DatasetOptions, workload_of
from octavo.cluster.load.load import Load
from octavo.cluster.load.progress import Progress
from octavo.cluster.load.served import Served, served
from octavo.cluster.load.target import Server
from octavo.router.policies import PolicyName

LENGTHS = {"num_prefixes": 8, "prefix_len": 1000, "input_len": 32, "output_len": 32}
SHARE = 0.8
"""Of the saturation of ``cost``."""
SEEDS = {"saturated": 0, "at rate": 1}
WANTED = {"prefill tokens": 0.25, "TTFT p50": 0.35, "throughput": 1.8}
"""Ratios of ``cost`` to ``round_robin``: at most, at most, at least."""


def trial(server: Served, load: Load, policy: PolicyName) -> Trial:
    here = replace(load, server=Server(server.url, {}))
    return asyncio.run(measure(here, policy, server, Progress(1, is_hidden=True)))


def figures(trial: Trial) -> dict[str, float]:
    spreads = trial.result.spreads()
    return {
        "requests/s": spreads["requests_per_s"].mean,
        "TTFT p50": spreads["ttft_s.p50"].mean,
        "TTFT p99": spreads["ttft_s.p99"].mean,
        "prefill tokens": sum(trial.counts.computed.values()),
        "hit rate": trial.counts.hit_rate,
    }


def measured(policy: PolicyName, load: Load, blocks: int, rate: float | None) -> dict[str, dict[str, float]]:
    """Both loads; without a ``rate``, that of this policy's own saturation."""
    flags = ["--replicas", "2", "--num-gpu-blocks-override", str(blocks), "--routing-policy", policy]
    with served(flags) as server:
        saturated = figures(trial(server, replace(load, seed=SEEDS["saturated"]), policy))
        rate = rate or SHARE * saturated["requests/s"]
        poisson = replace(load, rate=rate, max_concurrency=None, num_warmups=0, seed=SEEDS["at rate"])
        return {"saturated": saturated, "at rate": {"rate": rate, **figures(trial(server, poisson, policy))}}


def ratios(cost: dict[str, dict[str, float]], other: dict[str, dict[str, float]]) -> dict[str, float]:
    return {
        "prefill tokens": cost["at rate"]["prefill tokens"] / other["at rate"]["prefill tokens"],
        "TTFT p50": cost["at rate"]["TTFT p50"] / other["at rate"]["TTFT p50"],
        "throughput": cost["saturated"]["requests/s"] / other["saturated"]["requests/s"],
    }


def show(found: dict[str, Any]) -> None:
    for policy, loads in found.items():
        for name, values in loads.items():
            print(f"{policy}, {name}:", ", ".join(f"{key} {value:.3f}" for key, value in values.items()))


@click.command(help=__doc__)
@click.option("--requests", default=200)
@click.option("--blocks", default=340, help="Of 16 tokens, in each group.")
@click.option("--clients", default=24, help="Requests at once at saturation.")
def main(requests: int, blocks: int, clients: int) -> None:
    load = Load(
        server=Server("", {}),
        model=None,
        endpoint="/v1/completions",
        fields={"ignore_eos": True},
        workload=workload_of("prefix_repetition", DatasetOptions(**LENGTHS)),
        num_scripts=requests,
        max_concurrency=clients,
        num_warmups=2,
    )
    conditions = {"requests": requests, "blocks": blocks, "clients": clients, **LENGTHS, "cores": os.cpu_count()}
    conditions |= {"load": round(os.getloadavg()[0], 1), "python": platform.python_version()}
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    cost = measured("cost", load, blocks, None)
    other = measured("round_robin", load, blocks, cost["at rate"]["rate"])
    found = {"cost": cost, "round_robin": other}
    show(found)
    compared = ratios(cost, other)
    print(", ".join(f"{name} {ratio:.2f} × (wanted {WANTED[name]})" for name, ratio in compared.items()))
    print(json.dumps({"conditions": conditions, "figures": found, "ratios": compared}))


if __name__ == "__main__":
    main()
