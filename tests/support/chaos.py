"""Streams on a cluster of two nodes while its parts are killed at random: what comes out is what came before.

    .venv/bin/python tests/support/chaos.py --rounds 1000 --seed 7

Each round starts 40 streams, lets one fault strike at a random moment while they run, and compares every stream
with the same one undisturbed: texts, reasons and usage. The next one begins as soon as the cluster can bear it, beside
what comes up again. ``tests/operation/test_chaos.py`` has one round of each fault.
Ends with exit code 1 when anything differed, or was left when the cluster had been stopped.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
import psutil
from openai import OpenAI
from ray_probe import RayProbe
from raylets import Raylets, raylets
from serve_client import Choices, metric, wait_until_idle
from serve_process import ServeProcess, wait_until

OTHER = "127.0.0.3"
"""The node that is killed; the head has the gateway, whose end no stream can outlive."""
NUM_GROUPS = 3
NUM_STREAMS = 40
RECOVERY_S = 120.0
NEAR_TIE = 1e-3
"""Of two log-probabilities that are closer, rounding may decide (architecture: what "the same output" means)."""
GROUP_SIZE = 2
FLAGS = ("--replicas", "3", "--tensor-parallel-size", "2", "--placement", "nodes", "--num-gpu-blocks-override", "600")

FAULTS = (
    "SIGKILL of a leader",
    "SIGKILL of a rank",
    "SIGSTOP of a rank",
    "SIGSTOP of a leader",
    "SIGKILL of the router",
    "SIGKILL of a raylet",
)

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 48},
    "seeded": {"temperature": 0.8, "seed": 11, "max_tokens": 48},
    "branches": {"temperature": 1.0, "seed": 5, "n": 3, "max_tokens": 24},
    "stops": {"temperature": 0, "stop": [" the", "\n\n"], "max_tokens": 48},
    "schema": {"temperature": 0.5, "seed": 3, "max_tokens": 48, "response_format": {"type": "json_schema"}},
}
SUBJECTS = ("a lighthouse", "the sea", "a clock", "winter", "a small town", "bread", "a river", "the night train")


@dataclass(frozen=True)
class Stream:
    """One of the requests of a round."""

    name: str
    fields: dict[str, Any]


@dataclass
class Result:
    """What a round showed."""

    fault: str
    num_moved: int = 0
    differences: list[str] = field(default_factory=list)
    num_excused: int = 0
    num_groups: int = NUM_GROUPS
    """That served when the streams began."""
    streams_s: float = 0.0
    """Until the last one had ended."""

    def line(self) -> str:
        verdict = "; ".join(self.differences) or "all as undisturbed"
        excused = f", {self.num_excused} excused at a near-tie" if self.num_excused else ""
        when = f"{self.num_groups} groups, {self.streams_s:.0f} s"
        return f"{self.fault}: {self.num_moved} requests moved, {verdict}{excused}; {when}"


def streams() -> list[Stream]:
    """Eight of each kind, each about something else."""
    found = []
    for kind, settings in KINDS.items():
        for number, subject in enumerate(SUBJECTS):
            fields = dict(settings)
            if kind == "schema":
                fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
            if "seed" in fields:
                fields["seed"] += number
            fields["messages"] = [{"role": "user", "content": f"Write about {subject}, in some sentences."}]
            fields["stream_options"] = {"include_usage": True}
            found.append(Stream(f"{kind} {number}", fields))
    return found[:NUM_STREAMS]


class Cluster:
    """Three groups of two ranks over two raylets, with faults."""

    def __init__(self, nodes: Raylets, server: ServeProcess, probe: RayProbe) -> None:
        self.nodes = nodes
        self.server = server
        self.probe = probe
        self.client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=180)

    def prepared(self, fault: str, chance: random.Random) -> Callable[[], None]:
        """What lets the fault strike; whom it will hit is found now."""
        victims = {
            "SIGKILL of a leader": self._leaders,
            "SIGKILL of a rank": self._followers,
            "SIGSTOP of a rank": self._followers,
            "SIGSTOP of a leader": self._leaders,
            "SIGKILL of the router": lambda: self.nodes.processes("ray::RouterCore"),
            "SIGKILL of a raylet": lambda: [self.nodes.nodes[OTHER]],
        }
        victim = chance.choice(victims[fault]())
        return victim.suspend if "SIGSTOP" in fault else lambda: self._kill(victim)

    def _kill(self, victim: psutil.Process) -> None:
        """A node is started again at once, in the place of the one that is gone."""
        victim.kill()
        if victim == self.nodes.nodes[OTHER]:
            wait_until(lambda: _is_gone(victim), timeout_s=10, what="the raylet's end")
            self.nodes.start(OTHER)

    def wait_for_groups(self, count: int = NUM_GROUPS) -> None:
        """At least so many serve."""
        wait_until(lambda: self._num_ready() >= count, timeout_s=RECOVERY_S, what=f"{count} worker groups ready")

    def _num_ready(self) -> int:
        answer = httpx.get(f"{self.server.url}/ready", timeout=30)
        return int(answer.json()["reason"].split()[0]) if answer.status_code == 200 else 0

    def _leaders(self) -> list[psutil.Process]:
        return [psutil.Process(pid) for pid in self.probe.ask("leaders")]

    def _followers(self) -> list[psutil.Process]:
        """Of groups that serve: the processes of those that come up are younger."""
        leaders = set(self._leaders())
        ranks = self.nodes.processes("ray::Worker")[: GROUP_SIZE * self._num_ready()]
        return [process for process in ranks if process not in leaders]

    def run(self, stream: Stream, begun: threading.Semaphore | None = None) -> Choices:
        """Its answer, to the end."""
        is_first = True

        def on_text(_: dict[int, str]) -> None:
            nonlocal is_first
            if is_first and begun is not None:
                is_first = False
                begun.release()

        chunks = self.client.chat.completions.create(model=self.server.model, stream=True, **stream.fields)
        return Choices.of_stream(chunks, on_text)

    def run_all(self, disturb: Callable[[threading.Semaphore], None] | None = None) -> dict[str, Choices | Exception]:
        """All streams at once; ``disturb`` is called beside them."""
        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(NUM_STREAMS) as threads:
            futures = {stream.name: threads.submit(self.run, stream, begun) for stream in streams()}
            if disturb is not None:
                disturb(begun)
            return {name: _outcome(future.result) for name, future in futures.items()}

    def round(self, fault: str, chance: random.Random, undisturbed: dict[str, Choices | Exception]) -> Result:
        """One fault under all streams. One group is left at least."""
        self.wait_for_groups(NUM_GROUPS if "raylet" in fault else NUM_GROUPS - 1)
        result = Result(fault, num_groups=self._num_ready())
        strike = self.prepared(fault, chance)
        moved_before = metric(self.server, "octavo_gateway_failovers_total")

        def disturb(begun: threading.Semaphore) -> None:
            for _ in range(chance.randrange(NUM_STREAMS // 4, NUM_STREAMS)):  # so many streams have begun
                begun.acquire(timeout=60)
            time.sleep(chance.uniform(0.0, 0.5))
            strike()

        begin = time.monotonic()
        answers = self.run_all(disturb)
        result.streams_s = time.monotonic() - begin
        result.num_moved = round(metric(self.server, "octavo_gateway_failovers_total") - moved_before)
        for stream in streams():
            self._judge(stream, undisturbed[stream.name], answers[stream.name], result)
        return result

    def _judge(self, stream: Stream, expected: Choices | Exception, got: Choices | Exception, result: Result) -> None:
        if isinstance(expected, Exception) or isinstance(got, Exception):
            result.differences.append(f"{stream.name}: {got!r}, undisturbed {expected!r}")
        elif _told(expected) != _told(got):
            if self._is_near_tie(stream, expected, got):
                result.num_excused += 1
            else:
                result.differences.append(f"{stream.name}: {_told(got)}, undisturbed {_told(expected)}")

    def _is_near_tie(self, stream: Stream, expected: Choices, got: Choices) -> bool:
        """Greedy, and where the texts part two tokens were as good as each other."""
        if stream.fields["temperature"] != 0:
            return False
        answer = self.client.chat.completions.create(
            model=self.server.model,
            **{name: value for name, value in stream.fields.items() if name != "stream_options"},
            logprobs=True,
            top_logprobs=2,
        )
        same = _num_common(expected.texts[0], got.texts[0])
        position = 0
        for token in answer.choices[0].logprobs.content:
            position += len(token.token)
            if position > same:
                best, second = (each.logprob for each in token.top_logprobs)
                return bool(best - second < NEAR_TIE)
        return False


def _is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def _num_common(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _told(choices: Choices) -> tuple[Any, ...]:
    return choices.texts, choices.reasons, choices.usage.completion_tokens, choices.usage.prompt_tokens


def _outcome(result: Callable[[float], Choices]) -> Choices | Exception:
    try:
        return result(300.0)
    except Exception as error:
        return error


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster. Raises AssertionError when anything is left of it."""
    with raylets(OTHER) as nodes, closing(RayProbe(nodes.address, nodes.environment)) as probe:
        server = ServeProcess("--address", nodes.address, *FLAGS, environment=nodes.environment)
        try:
            yield Cluster(nodes, server, probe)
            wait_until_idle(server)
        finally:
            code = server.stop(signal.SIGTERM)
        assert code == 0, "".join(server.lines)
        check_nothing_left(nodes, server, probe)


def check_nothing_left(nodes: Raylets, server: ServeProcess, probe: RayProbe) -> None:
    """No process of a group, no placement group, no resource booked, no port."""
    for title in ("ray::Worker", "ray::RouterCore", "ray::ServeReplica"):
        wait_until(lambda title=title: not nodes.processes(title), timeout_s=20, what=f"no {title} left")
    nothing = {"placement_groups": 0, "cpus": 0.0}
    wait_until(lambda: probe.ask("held") == nothing, timeout_s=20, what="all places and CPUs given back")
    port = int(server.url.rsplit(":", 1)[1])
    listening = [each for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.laddr.port == port]
    assert not listening, f"port {port} is still taken: {listening}"


def run_rounds(target: Cluster, faults: Iterator[str], chance: random.Random, count: int) -> list[Result]:
    """``count`` rounds, each told when it is over."""
    target.wait_for_groups()
    undisturbed = target.run_all()
    results = []
    for number in range(count):
        results.append(target.round(next(faults), chance, undisturbed))
        print(f"round {number + 1}: {results[-1].line()}", flush=True)
    target.wait_for_groups()
    return results


def _random_faults(chance: random.Random, names: list[str]) -> Iterator[str]:
    while True:
        yield chance.choice(names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    parser.add_argument("--fault", action="append", help="only faults whose name holds this; may be repeated")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # takes the cluster down
    chance = random.Random(options.seed)
    print(f"seed {options.seed}", flush=True)
    with cluster() as target:
        names = [name for name in FAULTS if not options.fault or any(part in name for part in options.fault)]
        results = run_rounds(target, _random_faults(chance, names), chance, options.rounds)
    bad = [result for result in results if result.differences]
    moved = sum(result.num_moved for result in results)
    excused = sum(result.num_excused for result in results)
    print(f"{len(results)} rounds, {moved} requests moved, {excused} excused at a near-tie, {len(bad)} rounds differed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
