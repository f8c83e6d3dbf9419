"""``octavo simulate`` against a cluster: the same requests on two CPU groups, and on two simulated ones.

    python tests/bench/simulator_reality.py [--rate 2.5] [--prompts 150]

A cluster of two groups of the embedded model, whose pools hold 340 blocks each, serves prompts behind 8 beginnings of
1,000 tokens, of 32 tokens more, with 32 tokens out, in an open loop, and records them (``--record-trace``). The
simulator is given the recording, and times of steps that ``step_times.py`` measures first, in two processes of one
thread at once, since two groups share the two cores and the memory.

    hit rate    prompt tokens that were found in a cache, of all: within two points of each other is wanted
    TTFT        time to the first token: p50 within 15 % is wanted. The cluster's is the client's, with HTTP, the
                tokenizer and the router in it; the simulator has ``--submit-delay-ms`` for that

The last line is JSON.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from octavo.cluster.load.client import Client
from octavo.cluster.load.datasets import DatasetOptions, workload_of
from octavo.cluster.load.load import Load, perform
from octavo.cluster.load.prefill_counts import PrefillCounts, read_grown_counts
from octavo.cluster.load.progress import Progress
from octavo.cluster.load.sample import Run
from octavo.cluster.load.served import served
from octavo.cluster.load.target import ENDPOINTS, Server
from octavo.router.simulator.group import GroupConfig
from octavo.router.simulator.policies import RouterPolicy
from octavo.router.simulator.simulation import Simulation, SimulationConfig
from octavo.router.simulator.step_times import StepTimes, load_fitted
from octavo.router.simulator.trace_files import read_trace

NUM_GROUPS = 2
NUM_BLOCKS, BLOCK_SIZE = 340, 16
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 64, 512
LENGTHS = {"num_prefixes": 8, "prefix_len": 1000, "input_len": 32, "output_len": 32}


def measured_step_times(folder: Path) -> StepTimes:
    """While the other group computes too."""
    command = [sys.executable, str(Path(__file__).with_name("step_times.py")), "--threads", "1", "--rounds", "10"]
    files = [folder / f"steps {number}" for number in range(NUM_GROUPS)]
    processes = [subprocess.Popen(command, stdout=file.open("wb")) for file in files]
    for process in processes:
        assert process.wait() == 0
    return load_fitted(files[0], "step_times.py")


def serve(rate: float, prompts: int, recording: Path) -> tuple[Run, PrefillCounts]:
    flags = ("--replicas", str(NUM_GROUPS), "--num-gpu-blocks-override", str(NUM_BLOCKS))
    with served([*flags, "--record-trace", str(recording)]) as server:
        load = Load(
            server=Server(server.url, {}),
            model=None,
            endpoint=ENDPOINTS[0],
            fields={"ignore_eos": True},
            workload=workload_of("prefix_repetition", DatasetOptions(**LENGTHS)),
            num_scripts=prompts,
            rate=rate,
        )
        run = asyncio.run(perform(load, Progress(1, is_hidden=False))).runs[0]
        assert len(run.good()) == prompts, "some requests failed"
        return run, asyncio.run(counts_of(load.server, run))


async def counts_of(server: Server, run: Run) -> PrefillCounts:
    async with Client(server) as client:
        num_tokens = sum(sample.num_prompt_tokens or 0 for sample in run.good())
        return await read_grown_counts(client, PrefillCounts({}, {}), num_tokens)


def simulated(recording: Path, times: StepTimes, submit_delay_s: float) -> dict[str, Any]:
    group = GroupConfig(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        step_times=times,
    )
    config = SimulationConfig(NUM_GROUPS, group, submit_delay_s=submit_delay_s)
    new_policy = functools.partial(RouterPolicy, "cost")
    return Simulation(config, read_trace(recording), new_policy, on_finished=lambda: None).run().figures(2.0, 0.1)


@click.command(help=__doc__)
@click.option("--rate", default=2.5)
@click.option("--prompts", default=150)
@click.option("--submit-delay-ms", default=20.0)
def main(rate: float, prompts: int, submit_delay_ms: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        times = measured_step_times(Path(folder))
        recording = Path(folder) / "trace.jsonl"
        run, counts = serve(rate, prompts, recording)
        figures = simulated(recording, times, submit_delay_ms / 1e3)
    ttfts = sorted(sample.ttft_s for sample in run.good())
    real = {"hit_rate": counts.hit_rate, "ttft_p50_s": ttfts[len(ttfts) // 2], "ttft_p99_s": ttfts[-len(ttfts) // 100]}
    mock = {
        "hit_rate": figures["token_hit_rate"],
        "ttft_p50_s": figures["ttft_s"]["p50"],
        "ttft_p99_s": figures["ttft_s"]["p99"],
    }
    conditions = {"rate": rate, "prompts": prompts, "submit_delay_ms": submit_delay_ms, **LENGTHS}
    conditions |= {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "step_times": str(times)}
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    for name in real:
        print(f"{name:12} cluster {real[name]:.3f}  simulator {mock[name]:.3f}  ratio {mock[name] / real[name]:.3f}")
    print(json.dumps({"conditions": conditions, "cluster": real, "simulator": mock}))


if __name__ == "__main__":
    main()
