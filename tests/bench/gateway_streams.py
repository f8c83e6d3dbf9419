"""What the gateway costs for each streamed token, beside a plain FastAPI application that streams the same chunks.

    python tests/bench/gateway_streams.py [--streams 64] [--seconds 20] [--rounds 3] [--profile]

Ray Serve with the real gateway, router and leader; in place of a model an engine that gives each stream a token each
20 ms (``paced_group.py``). Beside it a FastAPI application under uvicorn, one process, where each stream sleeps until
the same ticks and yields a chunk of the same bytes. The same client, a process of its own, reads chats from the one and
from the other by turns; what it reads in the first ``--warm-up`` seconds does not count.

    CPU us      of a process, user and system, for each token; of the cluster's processes by kind
    ratio       the gateway's, of the plain application's in the same round
    p50, p99    milliseconds from the tick of a token until the client has read it, all of one tick together
    first, last the same for the first and the last stream of each tick, medians: what is between them is spent on
                the streams one after another, what is before is a token's way
    tokens      of those that are due at 50 tokens/s; several are in one chunk where the gateway or its client is late

Figures are medians over the rounds. ``--profile`` adds where the gateway's process spends its time: by thread, and in a
round in which py-spy slows it down, by library and function. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version

import click
import httpx2 as httpx
import orjson
import platformdirs
import psutil
from plain_stream import plain_server
from stream_client import Delays, Order, StreamClient
from stream_processes import PacedServer, profiled, thread_cpu_s
from ticks import PERIOD_S

from octavo.cluster.fake.words import words_of
from octavo.cluster.load.processes import KINDS, cpu_s
from octavo.worker.checkpoint.store import resolve_model

LIBRARIES = ("ray", "fastapi", "starlette", "uvicorn", "uvloop", "httptools")
LIMIT = 1.5
"""What the gateway may cost, of the plain application."""


@dataclass(frozen=True)
class Load:
    streams: int
    seconds: int
    warm_up: int

    @property
    def num_due(self) -> int:
        return round(self.streams * self.seconds / PERIOD_S)


@dataclass(frozen=True)
class Round:
    cpu_us: dict[str, float]
    """For each token, by kind of process."""
    delays: Delays


def measure(client: StreamClient, port: int, body: bytes, load: Load, cpu: Callable[[], Counter[str]]) -> Round:
    begin_s = time.monotonic() + load.warm_up
    client.start(Order(port, body, load.streams, begin_s, begin_s + load.seconds))
    time.sleep(load.warm_up)
    before = cpu()
    time.sleep(max(0.0, begin_s + load.seconds - time.monotonic()))
    spent, delays = cpu() - before, client.result()
    return Round({kind: 1e6 * seconds / delays.num_tokens for kind, seconds in spent.items()}, delays)


def chat(model: str, max_tokens: int) -> bytes:
    question = [{"role": "user", "content": "Say a thousand words."}]
    body = {"model": model, "messages": question, "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
    return orjson.dumps(body)


def chunks_of(port: int, model: str, texts: list[str]) -> list[bytes]:
    """The chunks that the gateway sends, for every text."""
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", content=chat(model, 3), timeout=30)
    chunk = answer.content.split(b"\n\n")[1] + b"\n\n"
    text = orjson.dumps(orjson.loads(chunk.removeprefix(b"data: "))["choices"][0]["delta"]["content"])
    head, _, tail = chunk.partition(text)
    return [head + orjson.dumps(each) + tail for each in texts]


def medians(rounds: list[Round]) -> dict[str, float]:
    figures = {f"{kind} CPU us": statistics.median(each.cpu_us.get(kind, 0.0) for each in rounds) for kind in KINDS}
    kept = {name: value for name, value in figures.items() if value > 0.0}
    delays = [asdict(each.delays) for each in rounds]
    return kept | {name: statistics.median(each[name] for each in delays) for name in delays[0]}


def report(ours: list[Round], plain: list[Round], load: Load) -> dict[str, object]:
    ratios = [a.cpu_us["gateway"] / b.cpu_us["plain"] for a, b in zip(ours, plain, strict=True)]
    figures = medians(ours)
    plain_figures = medians(plain) | {"CPU us": statistics.median(each.cpu_us["plain"] for each in plain)}
    for name, each in (("octavo", figures), ("plain", plain_figures)):
        share, together = each["num_tokens"] / load.num_due, each["num_tokens"] / each["num_chunks"]
        print(f"{name:8} tokens {100 * share:.1f} %, {together:.2f} a chunk", end="")
        print("".join(f"  {key} {each[key]:.2f}" for key in ("p50", "p99", "first", "last")), "ms")
    print(f"{'CPU us':28}{'plain':>28}{plain_figures['CPU us']:8.1f}")
    for kind in KINDS:
        print(f"{'':28}{kind:>28}{figures.get(f'{kind} CPU us', 0.0):8.1f}")
    ratio, added = statistics.median(ratios), figures["p99"] - plain_figures["p99"]
    print(f"gateway / plain: {ratio:.2f} (at most {LIMIT}), rounds {', '.join(f'{each:.2f}' for each in ratios)}")
    print(f"added p99: {added:.2f} ms")
    return {"ratio": ratio, "ratios": ratios, "added p99 ms": added, "octavo": figures, "plain": plain_figures}


def show_profile(client: StreamClient, server: PacedServer, body: bytes, load: Load) -> None:
    threads = measure(client, server.port, body, load, lambda: thread_cpu_s(server.gateway)).cpu_us
    print("the gateway's threads, CPU us:")
    for name, cpu_us in sorted(threads.items(), key=lambda each: -each[1]):
        print(f"{cpu_us:8.1f}  {name}")
    with profiled(server.gateway, load.seconds) as found:
        measure(client, server.port, body, load, server.cpu_s)
    print("who holds its GIL:")
    print("\n".join(found[0].lines()))


@click.command(help=__doc__)
@click.option("--streams", default=64)
@click.option("--seconds", default=20)
@click.option("--warm-up", default=5)
@click.option("--rounds", default=3)
@click.option("--profile", is_flag=True)
def main(streams: int, seconds: int, warm_up: int, rounds: int, profile: bool) -> None:
    load = Load(streams, seconds, warm_up)
    folder = resolve_model(None, cache_dir=platformdirs.user_cache_path("octavo"), report=print).path
    texts = list(words_of(folder))
    client, server = StreamClient(texts), PacedServer(streams)
    try:
        body = chat(server.model, round(2 * (warm_up + seconds) / PERIOD_S))
        ours, plain = [], []
        with plain_server(chunks_of(server.port, server.model, texts)) as (plain_pid, plain_port):
            plain_process = psutil.Process(plain_pid)
            for _ in range(rounds):
                ours.append(measure(client, server.port, body, load, server.cpu_s))
                plain.append(measure(client, plain_port, body, load, lambda: Counter(plain=cpu_s(plain_process))))
        conditions = load_conditions(load) | {"rounds": rounds, "model": server.model}
        print(", ".join(f"{name} {value}" for name, value in conditions.items()))
        figures = report(ours, plain, load)
        if profile:
            show_profile(client, server, body, load)
    finally:
        server.stop()
        client.close()
    print(json.dumps({"conditions": conditions, "figures": figures}))


def load_conditions(load: Load) -> dict[str, object]:
    machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version()}
    return asdict(load) | {"tokens/s": 1 / PERIOD_S} | machine | {name: version(name) for name in LIBRARIES}


if __name__ == "__main__":
    main()
