"""Octavo's prefix index against ray's PrefixTree and Dynamo's RadixTree: lookups, changes, memory, hashing.

    python tests/bench/router_peers.py --install
    python tests/bench/router_peers.py [--entries 1000000] [--groups 64] [--rounds 5] [--peers ray,dynamo]

``--install`` gives Dynamo, ``ai-dynamo-runtime``, an environment of its own and ends; ray's tree is in Octavo's own
Ray. A peer that is absent is skipped with a word. Each index lives in a process of its own, and they are asked in turn,
one at a time, in another order each round, with new prompts each round and the same for all.

Content is ``router_content.Content``: prompts of 512, 8,192 and 65,536 random tokens, each held whole by one group and
to random depths by three more. Looked up are prompts that leave a stored one at a random block; each answer is compared
with what is known to be right. What each is fed with, made before the clock starts:

    octavo    routing hashes, packed as in reports and queries
    ray       text, a character for each token; English has four, and its time grows with them
    dynamo    events as JSON; lookups by a list of its block hashes

Times are medians over the rounds: of CPU, all threads of the process, unless said otherwise. ``hash`` is what tokens
cost before a lookup; text has no such cost, but comes before tokens. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
from in_process import processor
from peer_bench.environments import ENVIRONMENTS, install, python_of
from peer_bench.errors import PeerError
from router_content import BLOCK_SIZE, LENGTHS

WORKER = Path(__file__).with_name("router_index_worker.py")
ENVIRONMENTS_FOLDER = platformdirs.user_cache_path("octavo") / "peers"
NUM_LOOKUPS = {512: 400, 8192: 200, 65536: 50}

Figures = dict[str, float]


class Worker:
    """One index in its process."""

    def __init__(self, name: str, python: Path, args: argparse.Namespace) -> None:
        self.name = name
        command = [str(python), str(WORKER), name, str(args.entries), str(args.groups)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._answer()

    def ask(self, method: str, *args: object) -> Figures:
        """Raises PeerError when the process has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([method, *args]), file=self._process.stdin, flush=True)
        figures: Figures = self._answer()
        return figures

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            words = self._process.stderr.read().strip().splitlines() or ["it ended without a word"]
            raise PeerError(words[-1])
        return json.loads(line)


def main() -> None:
    args = parse_args()
    if args.install:
        install(args.environments, "dynamo", None, say)
        say(f"dynamo: installed in {args.environments / 'dynamo'}")
        return
    load_before = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        workers = []
        for worker in start(args):
            stack.callback(worker.stop)
            workers.append(worker)
        rounds = measure(workers, args.rounds)
    figures = {name: {row: statistics.median(values) for row, values in each.items()} for name, each in rounds.items()}
    conditions = {
        "benchmark": "router_peers",
        "entries": args.entries,
        "groups": args.groups,
        "block_size": BLOCK_SIZE,
        "rounds": args.rounds,
        "machine": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load_before, 2),
        "dynamo": ENVIRONMENTS["dynamo"].requirements[0],
    }
    say(", ".join(f"{name} {value}" for name, value in conditions.items()))
    show(figures)
    print(json.dumps({"conditions": conditions, "figures": figures, "ratios": ratios(figures), "rounds": rounds}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=lambda text: text.split(","), default=["ray", "dynamo"], help="or none")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS_FOLDER, help="folder of peers' environments")
    parser.add_argument("--install", action="store_true", help="make Dynamo's environment, and end")
    return parser.parse_args()


def start(args: argparse.Namespace) -> Iterator[Worker]:
    """Octavo and the peers that are there, filled."""
    yield Worker("octavo", Path(sys.executable), args)
    for name in [name for name in args.peers if name != "none"]:
        try:
            python = python_of(args.environments, name) if name == "dynamo" else Path(sys.executable)
            yield Worker(name, python, args)
        except PeerError as error:
            say(f"{name}: skipped, {error}")


def measure(workers: list[Worker], num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Name → figure → its values."""
    measured: dict[str, dict[str, list[float]]] = {worker.name: {} for worker in workers}

    def note(worker: Worker, figures: Figures) -> None:
        for row, value in figures.items():
            measured[worker.name].setdefault(row, []).append(value)

    for worker in workers:
        note(worker, worker.ask("fill"))
        say(f"{worker.name}: filled")
    for number in range(num_rounds):
        for length, count in NUM_LOOKUPS.items():
            for worker in in_turn(workers, number):
                took = worker.ask("lookups", length, count, 1 + number)
                note(
                    worker,
                    {f"lookup {length} us": took["cpu_s"] * 1e6, f"lookup {length} wall us": took["wall_s"] * 1e6},
                )
        for length, count in NUM_LOOKUPS.items():
            for worker in in_turn(workers, number):
                took = worker.ask("hashing", length, count)
                note(worker, {f"hash {length} us, {source}": seconds * 1e6 for source, seconds in took.items()})
        for worker in in_turn(workers, number):
            note(worker, worker.ask("changes", 1000 + number))
    for worker in workers:
        note(
            worker, {f"removal of a group: {what[:-2]} ms": s * 1e3 for what, s in worker.ask("remove_groups").items()}
        )
    return measured


def in_turn(workers: list[Worker], number: int) -> list[Worker]:
    first = number % len(workers)
    return workers[first:] + workers[:first]


def ratios(figures: dict[str, Figures]) -> dict[str, Figures]:
    """Peer → what is measured → how many times Octavo's; with hashing from where the tokens are, too."""
    found: dict[str, Figures] = {}
    ours = figures["octavo"]
    for name in figures.keys() - {"octavo"}:
        theirs = figures[name]
        found[name] = {row: theirs[row] / ours[row] for row in ours if row in theirs and ours[row] > 0}
        for length in LENGTHS if name == "dynamo" else ():
            whole = theirs[f"hash {length} us, list"] + theirs[f"lookup {length} us"]
            found[name][f"hash + lookup {length} us"] = whole / (
                ours[f"hash {length} us, int32 array"] + ours[f"lookup {length} us"]
            )
    return found


def show(figures: dict[str, Figures]) -> None:
    """A row for each figure, a column for each index, with how many times Octavo's."""
    say(f"\n{'':34}" + "".join(f"{name:>24}" for name in figures))
    shown = ratios(figures)
    for row in dict.fromkeys(row for each in figures.values() for row in each):
        cells = [cell(each.get(row), shown.get(name, {}).get(row)) for name, each in figures.items()]
        say(f"{row:34}" + "".join(f"{text:>24}" for text in cells))
    for name, each in shown.items():
        sums = ", ".join(f"{row} {value:.1f} ×" for row, value in each.items() if row.startswith("hash +"))
        say(f"{name}, of Octavo's: {sums}" if sums else f"{name} is fed with text and hashes nothing")


def cell(value: float | None, ratio: float | None) -> str:
    text = "–" if value is None else f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"
    return text + (f" ({ratio:.2f} ×)" if ratio is not None else " " * 9)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
