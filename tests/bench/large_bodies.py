"""What large bodies do to the tokens of others in the same gateway.

    python tests/bench/large_bodies.py [--streams 8] [--rate 50] [--mb 100] [--bodies 3] [--model FOLDER]

A gateway without a cluster (a service that says one token after another, at ``--rate`` for each stream) runs in a
process of its own. While ``--streams`` clients read, another process posts bodies of ``--mb`` MB, one after another:
token ids, text, and messages of a chat, of these a tenth; all are refused, since no context is so long. A gap is the
time between two events of a stream as its client sees it. First without any bodies, then judged in the gateway's
process, then by a BodyWorker.

    p50, p99, max   gaps of all streams, in ms
    s/body          from the first byte to the answer

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn
from in_process import add_model_arguments, find_model
from one_model import one_model
from pydantic import ByteSize

from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.http.body_worker import BodyWorker
from octavo.cluster.api.request.judging import JudgeRecipe
from octavo.cluster.api.service import GenerationRequest, Route, ServedModel, TokenDelta
from octavo.cluster.http_config import HttpConfig

CONTEXT = 8192


class Ticking:
    """A generation that says a token at a steady rate until it is aborted."""

    route = Route("bench", 0, "bench")

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s

    async def tokens(self) -> AsyncIterator[TokenDelta]:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += self._period_s
            await asyncio.sleep(max(due - loop.time(), 0.0))
            yield TokenDelta((28,))

    def end(self, branch: int) -> None: ...

    def abort(self) -> None: ...


class TickingService:
    def __init__(self, rate: float) -> None:
        self._rate = rate

    async def start(self, request: GenerationRequest) -> Ticking:
        return Ticking(1 / self._rate)


def serve(folder: Path, rate: float, with_worker: bool, ready: Connection) -> None:
    info = ServedModel("bench", CONTEXT, created=0, max_num_seqs=64)
    recipe = JudgeRecipe(folder, info)
    worker = BodyWorker([recipe]) if with_worker else None
    service: Any = TickingService(rate)
    app = build_app(
        service, one_model(recipe.text(), info), http=HttpConfig(max_body_bytes=ByteSize(2**30)), body_worker=worker
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ready.send(listener.getsockname()[1])
        uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off")).run(sockets=[listener])


def body(kind: str, num_mb: int) -> bytes:
    size = num_mb * 10**6
    if kind == "ids":
        return b'{"model": "bench", "prompt": [1' + b",28" * (size // 3) + b"]}"
    if kind == "text":
        return b'{"model": "bench", "prompt": "' + b"word " * (size // 5) + b'"}'
    message = b'{"role": "user", "content": "hello"}'
    return b'{"model": "bench", "messages": [' + b",".join([message] * (size // 10 // len(message))) + b"]}"


def head(path: bytes, num_bytes: int, more: bytes = b"") -> bytes:
    fields = b"Host: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % num_bytes
    return b"POST " + path + b" HTTP/1.1\r\n" + fields + more + b"\r\n"


def post(port: int, kind: str, num_mb: int, count: int, result: Connection) -> None:
    content = body(kind, num_mb)
    path = b"/v1/chat/completions" if kind == "messages" else b"/v1/completions"
    begin = time.perf_counter()
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(head(path, len(content), b"Connection: close\r\n") + content)
            status = line.recv(12)
            while line.recv(65536):
                pass
    result.send(((time.perf_counter() - begin) / count, status.decode()))


async def read_stream(port: int, times: list[float], stop: asyncio.Event) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = json.dumps({"model": "bench", "prompt": "a", "stream": True, "max_tokens": 8000}).encode()
    writer.write(head(b"/v1/completions", len(request)) + request)
    while not stop.is_set():
        if b"data: " in await reader.readline():
            times.append(time.perf_counter())
    writer.close()


async def measure(port: int, args: argparse.Namespace, kind: str | None) -> dict[str, Any]:
    stop, streams = asyncio.Event(), [list[float]() for _ in range(args.streams)]
    tasks = [asyncio.create_task(read_stream(port, times, stop)) for times in streams]
    await asyncio.sleep(2.0)
    begin, seconds, status = time.perf_counter(), 0.0, ""
    if kind is None:
        await asyncio.sleep(5.0)
    else:
        parent, child = multiprocessing.Pipe()
        poster = multiprocessing.get_context("spawn").Process(
            target=post, args=(port, kind, args.mb, args.bodies, child)
        )
        poster.start()
        seconds, status = await asyncio.to_thread(parent.recv)
        poster.join()
    stop.set()
    await asyncio.gather(*tasks)
    gaps = [1e3 * (b - a) for times in streams for a, b in itertools.pairwise(times) if a > begin]
    p99 = statistics.quantiles(gaps, n=100)[98]
    found = {"p50": statistics.median(gaps), "p99": p99, "max": max(gaps), "s/body": seconds}
    return {"bodies": kind, "status": status, **{name: round(value, 1) for name, value in found.items()}}


def main() -> None:
    args = parse_args()
    folder = find_model(args)
    results = []
    for with_worker in args.worker:
        parent, child = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(folder, args.rate, bool(with_worker), child)
        )
        server.start()
        port = parent.recv()
        for kind in (None, "ids", "text", "messages"):
            result = {"worker": bool(with_worker), **asyncio.run(measure(port, args, kind))}
            print("  ".join(f"{name} {value}" for name, value in result.items()), flush=True)
            results.append(result)
        server.terminate()
        server.join()
    print(json.dumps({"streams": args.streams, "rate": args.rate, "mb": args.mb, "results": results}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rate", type=float, default=50.0, help="tokens a second of each stream")
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--bodies", type=int, default=3)
    parser.add_argument("--worker", type=int, nargs="*", default=[0, 1], help="1: with a BodyWorker")
    add_model_arguments(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
