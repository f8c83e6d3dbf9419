"""HTTP below the API: bodies in, event streams out, and noticing that a client has gone away."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
_KEEPALIVE = b": keep-alive\n\n"
_CLOSE = {"Connection": "close"}
"""The rest of a body is not read, so the connection cannot serve another request."""

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """Nobody is there to be answered any more."""


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytearray:
    """The body, which says that it is JSON. Raises HTTPException 413 or 415, 408 when nothing of it comes for
    ``timeout_s``, or ClientGone."""
    _check_content_type(request.headers.get("content-type", "application/json"))
    _check_encoding(request.headers.get("content-encoding", "identity"))
    announced = request.headers.get("content-length", "")
    _check_size(int(announced) if announced.isdecimal() else 0, max_bytes)
    body, clock = bytearray(), asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(timeout_s) as patience:
            async for chunk in request.stream():
                patience.reschedule(clock() + timeout_s)
                body += chunk
                _check_size(len(body), max_bytes)
    except ClientDisconnect as error:
        raise ClientGone from error
    except TimeoutError:
        message = f"Nothing of the request body came for {timeout_s:g} s."
        raise HTTPException(408, message, headers=_CLOSE) from None
    return body


def _check_content_type(content_type: str) -> None:
    if content_type.split(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "The body must be JSON, sent with the header 'Content-Type: application/json'.")


def _check_encoding(encoding: str) -> None:
    """A compressed body could be a thousand times as large as it says."""
    if encoding.strip().lower() not in ("", "identity"):
        raise HTTPException(415, "The body must not be compressed: send it without the header Content-Encoding.")


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise HTTPException(413, f"The request body is larger than {max_bytes} bytes.", headers=_CLOSE)


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
    """Server-sent events, until ``next_events`` gives none or the client leaves.

    The client's leaving is noticed while events are awaited, not only when there is something to send. Whenever nothing
    was sent for ``keepalive_s`` a comment is, so that no proxy takes a long queue or prefill for a dead connection.

    The next events are asked for when the last ones could be written: while a client is slow its tokens gather where
    they come from, and go out together. One that takes nothing for ``slow_client_timeout_s`` is cut off. ``on_close``
    is called at the end in every case, also when no event was asked for.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        next_events: Callable[[], Awaitable[bytes]],
        headers: Mapping[str, str],
        *,
        keepalive_s: float | None,
        slow_client_timeout_s: float,
        on_close: Callable[[], None],
    ) -> None:
        self._next_events = next_events
        self._on_close = on_close
        self._keepalive_s = keepalive_s
        self._slow_client_timeout_s = slow_client_timeout_s
        self._last_sent = time.monotonic()
        self._is_sending = False
        self.status_code = 200
        self.background = None
        # Proxies are told not to collect events (nginx reads the second header).
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Between the head and the end, the layers around the route have nothing to do with what is sent.
        direct_send = scope.get("state", {}).get("direct_send", send)
        try:
            await self._run(receive, send, direct_send)
        finally:
            self._on_close()

    async def _run(self, receive: Receive, send: Send, direct_send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sender = asyncio.create_task(self._send_events(send, direct_send))
        watcher = asyncio.create_task(_disconnected(receive))
        keeper = asyncio.create_task(self._keep_alive(direct_send))
        try:
            await asyncio.wait({sender, watcher, keeper}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = sender.done()
            await _cancel(sender, watcher, keeper)
        if finished:
            sender.result()

    async def _send_events(self, send: Send, direct_send: Send) -> None:
        # A server reports a broken connection either as http.disconnect or as OSError from send.
        with suppress(OSError):
            while events := await self._next_events():
                await self._send(direct_send, events, more_body=True)
            await self._send(send, b"", more_body=False)

    async def _send(self, send: Send, body: bytes, *, more_body: bool) -> None:
        """Returns when the server has room for more: with a slow client, later."""
        self._last_sent = time.monotonic()
        self._is_sending = True
        await send({"type": "http.response.body", "body": body, "more_body": more_body})
        self._is_sending = False

    async def _keep_alive(self, send: Send) -> None:
        """Sends comments when they are due; returns when the client has to be cut off."""
        while True:
            period = self._slow_client_timeout_s if self._is_sending else self._keepalive_s
            wait = self._last_sent + (period or math.inf) - time.monotonic()
            if wait > 0.0:
                # What is due changes with every event: look again in time for either of the two.
                await asyncio.sleep(min(wait, self._slow_client_timeout_s))
            elif self._is_sending:
                logger.warning("a client that read nothing for %g s was cut off", self._slow_client_timeout_s)
                return
            else:
                await self._comment(send)

    async def _comment(self, send: Send) -> None:
        # A comment may have to wait too; the task that sends events must not wait for it.
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._slow_client_timeout_s):
                await self._send(send, _KEEPALIVE, more_body=True)
