"""Clients that read many streams of ticks' words at once, in a process of their own: how late each word comes."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import cast

import uvloop
from ticks import PERIOD_S, delay_s

_CONTENT = b'"content":"'


@dataclass(frozen=True)
class Order:
    """``num_streams`` of them, of which the words count that come from ``begin_s`` on, until ``end_s``."""

    port: int
    body: bytes
    num_streams: int
    begin_s: float
    """On the monotonic clock, as ``end_s``."""
    end_s: float

    @property
    def request(self) -> bytes:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(self.body)}\r\n\r\n".encode() + self.body


@dataclass(frozen=True)
class Delays:
    """Milliseconds from a tick until its word was read."""

    num_tokens: int
    p50: float
    p99: float
    first: float
    """Of the first stream that has the tick's word, and of the last one: medians."""
    last: float
    num_chunks: int
    """Fewer than tokens where several came together."""


@dataclass
class _Record:
    begin_s: float
    end_s: float
    words: Mapping[bytes, int]
    by_tick: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_chunks: int = 0

    def add(self, texts: list[bytes], now_s: float) -> None:
        if not self.begin_s <= now_s < self.end_s:
            return
        self.num_chunks += len(texts)
        for text in b"".join(texts).split():
            delay = delay_s(self.words[text], now_s)
            self.by_tick[round((now_s - delay) / PERIOD_S)].append(1e3 * delay)

    def delays(self) -> Delays:
        ticks = list(self.by_tick.values())
        cuts = statistics.quantiles([delay for tick in ticks for delay in tick], n=100)
        first, last = (statistics.median(map(bound, ticks)) for bound in (min, max))
        return Delays(sum(map(len, ticks)), cuts[49], cuts[98], first, last, self.num_chunks)


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, record: _Record) -> None:
        self._request, self._record = request, record
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        if b"HTTP/1.1" in data and b"HTTP/1.1 200" not in data:
            raise RuntimeError(data.decode(errors="replace"))
        texts, self._buffer = _texts(self._buffer + data)
        if texts:
            self._record.add(texts, now_s)


def _texts(buffer: bytes) -> tuple[list[bytes], bytes]:
    """The texts that are complete, and what is left. The first chunk, of the role, has an empty one."""
    texts, position = [], 0
    while (found := buffer.find(_CONTENT, position)) >= 0:
        begin = found + len(_CONTENT)
        if (end := buffer.find(b'"', begin)) < 0:
            break
        position = end
        if end > begin:
            texts.append(buffer[begin:end])
    return texts, buffer[position:]


async def _read(order: Order, words: Mapping[bytes, int]) -> Delays:
    loop, record = asyncio.get_running_loop(), _Record(order.begin_s, order.end_s, words)
    opened = [
        await loop.create_connection(lambda: _Stream(order.request, record), "127.0.0.1", order.port)
        for _ in range(order.num_streams)
    ]
    await asyncio.sleep(order.end_s - time.monotonic())
    for transport, _ in opened:
        transport.abort()
    return record.delays()


def _serve_orders(words: Mapping[bytes, int], line: Connection) -> None:
    while (order := line.recv()) is not None:
        line.send(uvloop.run(_read(order, words)))


class StreamClient:
    """The process. ``start``, and then ``result``; ``close`` at the end. ``texts``: the words of ticks, in turn."""

    def __init__(self, texts: list[str]) -> None:
        self._line, line = multiprocessing.Pipe()
        words = {text.strip().encode(): number for number, text in enumerate(texts)}
        self._process = multiprocessing.get_context("spawn").Process(target=_serve_orders, args=(words, line))
        self._process.start()

    def start(self, order: Order) -> None:
        self._line.send(order)

    def result(self) -> Delays:
        answer = self._line.recv()
        assert isinstance(answer, Delays)
        return answer

    def close(self) -> None:
        self._line.send(None)
        self._process.join()
