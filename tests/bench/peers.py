"""Octavo against vLLM for CPUs, transformers' continuous batching and llama.cpp, through the HTTP API, on this machine.

    python tests/bench/peers.py --install [--peers vllm,transformers,llamacpp] [--environments FOLDER]
    python tests/bench/peers.py [--peers …] [--octavo-variants float32,int8] [--llamacpp-types float32,q8_0,q4_1]
                                [--workloads W1,W2,W4,W3,greedy] [--rounds 3] [--limit-s 300] [--seed TEXT]

``--install`` gives each peer an environment of its own, 5 GB in all, and ends. A run needs no network. Each round
starts one server after the other, in another order, and stops it before the next one starts: they would share the
cores. A server is warmed up; then come the workloads (``peer_bench/workloads.py`` says what they are), with the same
prompts for all servers of a round. ``--peers none`` measures Octavo alone. All serve SmolLM2-135M-Instruct, with the
same weights; llama.cpp keeps its KV in float16, as it does by default, the others in float32. ``octavo`` is one worker
group on all cores.

    start    from the start of the process to the first token of its first request, in s; what a server compiles and
             keeps for later starts is kept
    –        not asked, or not done within ``--limit-s``: a line says which

Figures are medians over the rounds. A peer that is not installed, does not start or breaks off is skipped with a word.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import platformdirs
from in_process import processor
from peer_bench.client import Client
from peer_bench.environments import SERVERS, install, python_of
from peer_bench.errors import PeerError
from peer_bench.gguf_files import TYPES, gguf_file
from peer_bench.prompts import Prompt, Prompts, Vocabulary, questions
from peer_bench.report import EXPECTED, medians, ratios, sentences, table
from peer_bench.running import START_TIMEOUT_S, Running
from peer_bench.servers import Server, llamacpp, octavo, transformers, vllm
from peer_bench.workloads import NUM_QUESTIONS, QUESTION_TOKENS, WORKLOADS, Figures, Workload, greedy, warm_up

from octavo.worker.checkpoint import resolve_model

CACHE = platformdirs.user_cache_path("octavo")
GREEDY, WARM_UP, START = "greedy", "warm-up", "start"


def main() -> None:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # servers are stopped on the way out
    if args.install:
        raise SystemExit(install_all(args))
    model_dir = resolve_model(None, cache_dir=CACHE, report=print).path
    vocabulary = Vocabulary(model_dir)
    servers = list(find_servers(args, model_dir))
    workloads = find_workloads(args.workloads, model_dir, vocabulary)
    started, load_before = time.perf_counter(), os.getloadavg()[0]
    rounds: dict[str, list[Figures]] = {server.name: [] for server in servers}
    for number in range(args.rounds):
        for server in servers[number % len(servers) :] + servers[: number % len(servers)]:
            prompts = {
                name: Prompts(vocabulary, f"{args.seed}, round {number}, {name}")
                for name in (START, WARM_UP, *workloads)
            }
            rounds[server.name].append(measure(server, workloads, prompts, args.limit_s))
    conditions = {
        "model": "SmolLM2-135M-Instruct",
        "machine": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load_before, 2),
        "commit": commit(),
        "servers": [server.version for server in servers],
        "rounds": args.rounds,
        "seed": args.seed,
        "wall_s": round(time.perf_counter() - started),
    }
    show(conditions, servers, rounds)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=some_of(SERVERS), default=[*SERVERS], help="or none")
    parser.add_argument("--octavo-variants", type=some_of(EXPECTED), default=["float32"], help="float32,int8")
    parser.add_argument("--llamacpp-types", type=some_of(TYPES), default=[*TYPES])
    parser.add_argument("--workloads", type=some_of([*WORKLOADS, GREEDY]), default=[*WORKLOADS, GREEDY])
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--limit-s", type=at_least_one, default=300, help="seconds that a workload may take")
    parser.add_argument(
        "--seed", default=secrets.token_hex(4), help="of the prompts; default: prompts never seen before"
    )
    parser.add_argument("--environments", type=Path, default=CACHE / "peers", help="folder of the peers' environments")
    parser.add_argument("--install", action="store_true", help="make the peers' environments, and end")
    parser.add_argument("--extra-index-url", help="for --install: where pip finds a CPU build of PyTorch")
    return parser.parse_args(arguments)


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """The type of an argument that is some of ``known``, with commas between, or ``none`` of them."""

    def parse(text: str) -> list[str]:
        names = [] if text == "none" else text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def install_all(args: argparse.Namespace) -> int:
    """The exit code: 1 if a peer could not be installed."""
    failed = 0
    for peer in args.peers:
        try:
            install(args.environments, peer, args.extra_index_url, say)
            say(f"{peer}: installed in {args.environments / peer}")
        except PeerError as error:
            failed = 1
            say(f"{peer}: {error}")
    return failed


def find_servers(args: argparse.Namespace, model_dir: Path) -> Iterator[Server]:
    cores = sorted(os.sched_getaffinity(0))
    for variant in args.octavo_variants:
        yield octavo(variant, commit())
    makers: dict[str, Callable[[Path, str], list[Server]]] = {
        "vllm": lambda python, version: [vllm(python, version, model_dir, cores)],
        "transformers": lambda python, version: [transformers(python, version, model_dir)],
        "llamacpp": lambda python, version: [
            llamacpp(python, version, kind, gguf_file(args.environments, kind, CACHE / "downloads", say), len(cores))
            for kind in args.llamacpp_types
        ],
    }
    for peer in args.peers:
        try:
            python = python_of(args.environments, peer)
        except PeerError as error:
            say(f"{peer}: skipped, {error}")
            continue
        yield from makers[peer](python, SERVERS[peer].requirements[0])


def find_workloads(names: list[str], model_dir: Path, vocabulary: Vocabulary) -> dict[str, Workload]:
    found = {name: workload for name, workload in WORKLOADS.items() if name in names}
    if GREEDY not in names:
        return found
    asked = questions(vocabulary, NUM_QUESTIONS)
    return {GREEDY: greedy(asked, reference(model_dir, asked)), **found}


def reference(model_dir: Path, prompts: list[Prompt]) -> list[str]:
    """Transformers' greedy answers in float32, as text."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        token_ids = torch.tensor([prompt.token_ids])
        output = model.generate(
            token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=QUESTION_TOKENS, do_sample=False
        )
        answers.append(tokenizer.decode(output[0, token_ids.shape[1] :], skip_special_tokens=True))
    return answers


def measure(server: Server, workloads: dict[str, Workload], prompts: dict[str, Prompts], limit_s: float) -> Figures:
    """The figures of one start of ``server``; those that it had got to where it failed."""
    figures: Figures = {}
    say(f"{server.name}: starting")
    try:
        with Running(server) as running:
            asyncio.run(measure_running(running, workloads, prompts, limit_s, figures))
    except PeerError as error:
        say(f"{server.name}: skipped from here on, {error}")
    say(f"{server.name}: " + ", ".join(f"{metric} {value:.4g}" for metric, value in figures.items()))
    return figures


async def measure_running(
    running: Running,
    workloads: dict[str, Workload],
    prompts: dict[str, Prompts],
    limit_s: float,
    figures: Figures,
) -> None:
    async with Client(running.server, running.url) as client:
        await client.first_token(prompts[START].words(8), running.started + START_TIMEOUT_S)
        figures["start s"] = time.perf_counter() - running.started
        for name, workload in {WARM_UP: warm_up, **workloads}.items():
            try:
                async with asyncio.timeout(limit_s):
                    await workload(client, prompts[name], figures)
            except TimeoutError:
                say(f"{running.server.name}: {name} broken off after {limit_s} s")


def show(conditions: dict[str, object], servers: list[Server], rounds: dict[str, list[Figures]]) -> None:
    figures = {name: medians(each) for name, each in rounds.items()}
    rows = ratios(servers, figures)
    say("\n".join(["", table(figures), *sentences(rows, figures)]))
    say(", ".join(f"{name} {value}" for name, value in conditions.items()))
    print(json.dumps({"conditions": conditions, "figures": figures, "ratios": rows, "rounds": rounds}))


def commit() -> str:
    """Of this checkout; with a plus when files differ from it."""
    folder = Path(__file__).parent
    git = ["git", "-C", str(folder)]
    done = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, check=False).returncode
    return (done.stdout.strip() or "unknown") + ("+" if changed else "")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
