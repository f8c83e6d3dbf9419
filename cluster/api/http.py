"""HTTP below the API: bodies in, event streams out, and noticing that a client has gone away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
_KEEPALIVE = b": keep-alive\n\n"


class ClientGone(Exception):
    """Nobody is there to be answered any more."""


async def read_json(request: Request, max_bytes: int) -> Any:
    """The body as JSON. Raises HTTPException 413 or 415, or orjson.JSONDecodeError.

    NaN, infinities, unpaired surrogates and nesting deeper than 1,024 are no JSON here.
    """
    _check_content_type(request.headers.get("content-type", "application/json"))
    announced = request.headers.get("content-length", "")
    _check_size(int(announced) if announced.isdecimal() else 0, max_bytes)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            _check_size(len(body), max_bytes)
    except ClientDisconnect as error:
        raise ClientGone from error
    return orjson.loads(body)


def _check_content_type(content_type: str) -> None:
    if content_type.split(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "The body must be JSON, sent with the header 'Content-Type: application/json'.")


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        # The rest of the body is not read, so the connection cannot serve another request.
        headers = {"Connection": "close"}
        raise HTTPException(413, f"The request body is larger than {max_bytes} bytes.", headers=headers)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, or ClientGone when the client leaves first; ``work`` is then cancelled.

    The request's body must have been read.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGone
        return worker.result()
    finally:
        await _cancel(worker, watcher)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events from an iterator that ends, and is closed, when the client leaves.

    The client's leaving is noticed while the iterator waits, not only when there is something to send. Whenever nothing
    was sent for ``keepalive_s`` a comment is, so that no proxy takes a long queue or prefill for a dead connection.
    ``on_close`` is called at the end in every case, also when ``events`` was never begun.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        headers: Mapping[str, str],
        *,
        keepalive_s: float | None,
        on_close: Callable[[], None],
    ) -> None:
        self._events = events
        self._on_close = on_close
        self._keepalive_s = keepalive_s
        self._last_sent = time.monotonic()
        self.status_code = 200
        self.background = None
        # Proxies are told not to collect events (nginx reads the second header).
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._run(receive, send)
        finally:
            self._on_close()

    async def _run(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sender = asyncio.create_task(self._send_events(send))
        watcher = asyncio.create_task(_disconnected(receive))
        keeper = asyncio.create_task(self._keep_alive(send))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = sender.done()
            await _cancel(sender, watcher, keeper)
        if finished:
            sender.result()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        # A server reports a broken connection either as http.disconnect or as OSError from send.
        with suppress(OSError):
            async with aclosing(self._events) as events:
                async for event in events:
                    self._last_sent = time.monotonic()
                    await send({"type": "http.response.body", "body": event, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        while self._keepalive_s is not None:
            wait = self._last_sent + self._keepalive_s - time.monotonic()
            await asyncio.sleep(max(wait, 0.0))
            if time.monotonic() - self._last_sent >= self._keepalive_s:
                self._last_sent = time.monotonic()
                with suppress(OSError):
                    await send({"type": "http.response.body", "body": _KEEPALIVE, "more_body": True})
