"""``octavo bench serve`` beside another load generator, NVIDIA's aiperf: the same load on the same server, by turns.

    python -m venv peers && peers/bin/pip install aiperf==0.13.0
    python tests/bench/load_peers.py --aiperf peers/bin/aiperf [--rounds 2]

Two groups of the embedded model; 48 prompts of 128 tokens, 32 tokens out, 4 at once. Each generator has texts of its
own, of as many tokens, so that the server does the same work for both. Of each figure the mean over the rounds and the
ratio of ours to the other's are printed; what a generator finds of one server in two rounds differs by a tenth and more
on two cores. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import platformdirs

from octavo.cluster.load.served import Served, served
from octavo.worker.checkpoint.store import resolve_model

MODEL = "SmolLM2-135M-Instruct"
PROMPTS, CONCURRENCY, INPUT, OUTPUT = 48, 4, 128, 32
TIMEOUT_S = 300.0


def run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=os.environ, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def ours(server: Served, folder: Path, seed: int) -> dict[str, float]:
    result = folder / f"ours {seed}.json"
    lengths = ["--input-len", str(INPUT), "--output-len", str(OUTPUT)]
    load = ["--dataset-name", "random", *lengths, "--num-prompts", str(PROMPTS), "--max-concurrency", str(CONCURRENCY)]
    where = ["--base-url", server.url, "--json", str(result), "--disable-tqdm", "--ignore-eos", "--seed", str(seed)]
    run([sys.executable, "-m", "octavo.cluster", "bench", "serve", *load, *where])
    figures = json.loads(result.read_bytes())["repeats"][0]
    return {
        "TTFT p50, ms": 1e3 * figures["ttft_s"]["p50"],
        "time per token p50, ms": 1e3 * figures["tpot_s"]["p50"],
        "output tokens/s": figures["output_tokens_per_s"],
    }


def aiperf(program: Path, tokenizer: Path, server: Served, folder: Path, seed: int) -> dict[str, float]:
    out = folder / f"aiperf {seed}"
    load = ["--isl", str(INPUT), "--osl", str(OUTPUT), "--request-count", str(PROMPTS), "--random-seed", str(seed)]
    what = ["--model", MODEL, "--tokenizer", str(tokenizer), "--endpoint-type", "completions", "--streaming"]
    where = ["--url", server.url, "--artifact-dir", str(out), "--ui", "none", "--extra-inputs", "ignore_eos:true"]
    run([program, "profile", *what, *load, "--concurrency", str(CONCURRENCY), *where])
    figures = json.loads(next(out.rglob("profile_export_aiperf.json")).read_bytes())
    return {
        "TTFT p50, ms": figures["time_to_first_token"]["p50"],
        "time per token p50, ms": figures["inter_token_latency"]["p50"],
        "output tokens/s": figures["output_token_throughput"]["avg"],
    }


def means(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.mean(each[name] for each in rounds) for name in rounds[0]}


@click.command(help=__doc__)
@click.option("--aiperf", "program", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--rounds", default=2)
def main(program: Path, rounds: int) -> None:
    tokenizer = resolve_model(None, cache_dir=platformdirs.user_cache_path("octavo"), report=print).path
    mine, theirs = [], []
    with tempfile.TemporaryDirectory() as name, served(["--replicas", "2"]) as server:
        folder = Path(name)
        ours(server, folder, 99)  # warms up
        for seed in range(rounds):
            mine.append(ours(server, folder, seed))
            theirs.append(aiperf(program.absolute(), tokenizer, server, folder, seed))
    conditions = {"prompts": PROMPTS, "at once": CONCURRENCY, "input": INPUT, "output": OUTPUT, "rounds": rounds}
    conditions |= {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    print(", ".join(f"{key} {value}" for key, value in conditions.items()))
    found, other = means(mine), means(theirs)
    for key in found:
        print(f"{key:24} octavo bench {found[key]:8.1f}  aiperf {other[key]:8.1f}  ratio {found[key] / other[key]:.3f}")
    print(json.dumps({"conditions": conditions, "octavo": mine, "aiperf": theirs}))


if __name__ == "__main__":
    main()
