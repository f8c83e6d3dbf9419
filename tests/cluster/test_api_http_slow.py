"""Clients that read slowly, or not at all, and what is sent while there is nothing to say."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from one_model import one_model
from scripted_cluster import taken

from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.http.transport import EventStream
from octavo.cluster.api.service import ServedModel, TokenDelta
from octavo.cluster.api.text.processor import TextProcessor
from octavo.cluster.http_config import HttpConfig
from octavo.cluster.send_buffers import SEND_BUFFER_BYTES, limit_send_buffers
from octavo.cluster.token_stream import GroupLost, TokenStream
from octavo.worker.messages import FinishReason, SequenceUpdate, TokenLogprobs

from .conftest import served

LONG = b"data: " + b"x" * 100_000 + b"\n\n"


class Events:
    """An endless stream; counts what was taken from it."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.closed = asyncio.Event()

    async def next(self) -> bytes:
        self.num_taken += 1
        return LONG


def stream(events: Events, *, slow_client_timeout_s: float, keepalive_s: float | None = None) -> EventStream:
    return EventStream(
        events.next,
        {},
        keepalive_s=keepalive_s,
        slow_client_timeout_s=slow_client_timeout_s,
        on_close=events.closed.set,
    )


@contextlib.asynccontextmanager
async def reading_nothing(url: str) -> AsyncIterator[socket.socket]:
    """A connection whose client has asked and reads no answer."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(line.connect, (host, int(port)))
        line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        yield line


async def test_a_client_that_reads_nothing_is_cut_off_and_asked_for_no_more() -> None:
    events = Events()
    async with served(stream(events, slow_client_timeout_s=0.2)) as url, reading_nothing(url):
        await asyncio.wait_for(events.closed.wait(), 10)
        num_taken = events.num_taken
        await asyncio.sleep(0)
        assert events.num_taken == num_taken < 1_000, "what the sockets hold, and no more"


async def test_a_client_that_reads_now_and_then_is_not() -> None:
    """The limit is on one wait, not on all of them together."""
    events, sent = Events(), asyncio.Semaphore(0)

    async def send(message: Any) -> None:
        await asyncio.sleep(0.1)
        sent.release()

    async def receive() -> Any:
        for _ in range(12):
            await sent.acquire()
        return {"type": "http.disconnect"}

    await stream(events, slow_client_timeout_s=0.8)({"type": "http"}, receive, send)
    assert events.num_taken > 10


async def test_comments_do_not_keep_such_a_client_alive() -> None:
    """The stream is silent when the client's buffers are full: it is the comments that cannot be sent."""
    closed = asyncio.Event()
    filled: asyncio.Queue[bytes] = asyncio.Queue()
    filled.put_nowait(b"x" * 30_000_000)
    response = EventStream(filled.get, {}, keepalive_s=0.05, slow_client_timeout_s=0.3, on_close=closed.set)
    async with served(response) as url, reading_nothing(url):
        await asyncio.wait_for(closed.wait(), 10)


@pytest.mark.parametrize(("keepalive_s", "comes"), [(0.02, True), (0, False)])
async def test_case_bug_033_comments_while_the_first_token_is_awaited(
    service: Any, text: TextProcessor, info: ServedModel, keepalive_s: float, comes: bool
) -> None:
    """And the head of the answer comes before them, but not before the request was judged."""

    async def prefill() -> None:
        await asyncio.sleep(0.2)

    service.script = lambda _: [prefill, TokenDelta((500,), FinishReason.LENGTH)]
    app = build_app(service, one_model(text, info), http=HttpConfig(keepalive_s=keepalive_s))
    body = {"model": "smollm2", "prompt": "a", "stream": True}
    async with served(app) as url:
        content = await asyncio.to_thread(_exchange, url, orjson.dumps(body))
        refused = await asyncio.to_thread(_exchange, url, orjson.dumps({**body, "n": 0}))
    assert content.startswith(b"HTTP/1.1 200 ")
    assert (b": keep-alive\n\n" in content.partition(b"data: ")[0]) is comes
    assert content.count(b"data: [DONE]") == 1
    assert refused.startswith(b"HTTP/1.1 400 ")


def _exchange(url: str, body: bytes) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection((host, int(port))) as line:
        line.sendall(head.encode() + b"Content-Type: application/json\r\nExpect: 100-continue\r\n\r\n" + body)
        content = b"".join(iter(lambda: line.recv(65_536), b""))
    return content.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")


async def test_half_a_body_is_not_waited_for(service: Any, text: TextProcessor, info: ServedModel) -> None:
    app = build_app(service, one_model(text, info), http=HttpConfig(slow_client_timeout_s=0.1))
    async with served(app) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        content = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert content.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in content


def test_send_buffers_of_a_port_are_limited_before_and_after_a_connection_comes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        address = listener.getsockname()
        with socket.create_connection(address), listener.accept()[0] as early:
            assert limit_send_buffers(address[1]) == 2
            with socket.create_connection(address), listener.accept()[0] as late:
                sizes = {line.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for line in (listener, early, late)}
        assert sizes == {2 * SEND_BUFFER_BYTES}
        assert other.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) not in sizes


def test_other_descriptors_are_left_alone() -> None:
    with Path(__file__).open():
        before = len(os.listdir("/proc/self/fd"))
        assert limit_send_buffers(1) == 0
        assert len(os.listdir("/proc/self/fd")) == before


# ---- what gathers while a client is slow ----


def update(branch: int, position: int, *tokens: int, **more: Any) -> SequenceUpdate:
    logprobs = tuple(TokenLogprobs(-float(token), 1) for token in tokens)
    return SequenceUpdate("r", branch, position, tokens, logprobs=logprobs, **more)


async def test_it_comes_as_one_update_for_each_branch() -> None:
    stream = TokenStream({0: 0, 1: 0})
    stream.put(update(0, 0, 1, num_cached_tokens=16))
    stream.put(update(1, 0, 7))
    stream.put(update(0, 1, 2, 3))
    stream.put(update(0, 3, 4, finish_reason=FinishReason.STOP))
    stream.lose(GroupLost(is_dead=True))
    first, second = await taken(stream)
    assert first == update(0, 0, 1, 2, 3, 4, finish_reason=FinishReason.STOP, num_cached_tokens=16)
    assert second == update(1, 0, 7)
    with pytest.raises(GroupLost):
        await taken(stream)
