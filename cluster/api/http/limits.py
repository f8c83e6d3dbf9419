"""What a gateway takes on: the size of headers, how many requests at once. Bodies are limited where they are read."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from ....worker.errors import Overloaded
from .auth import is_open

MAX_HEADER_BYTES = 32 * 1024
"""Of all headers together. The proxy in front of ``octavo serve`` has a limit of its own, 15 KiB."""

RETRY_AFTER_S = 1.0


class Limits:
    """Answers 431 or 429 before a body is read. ``max_concurrent`` None: any number.

    A request counts until its answer is sent. Probes and the documentation do not: they are answered when nothing else
    is.
    """

    def __init__(self, app: ASGIApp, max_concurrent: int | None) -> None:
        self._app = app
        self._max_concurrent = max_concurrent
        self._num_running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if num_bytes > MAX_HEADER_BYTES:
            raise HTTPException(431, f"The headers have {num_bytes} bytes, at most {MAX_HEADER_BYTES} are allowed.")
        if self._max_concurrent is None or is_open(scope):
            await self._app(scope, receive, send)
            return
        await self._counted(self._max_concurrent, scope, receive, send)

    async def _counted(self, limit: int, scope: Scope, receive: Receive, send: Send) -> None:
        if self._num_running >= limit:
            message = f"This gateway works on {self._num_running} requests, the most that it takes at once."
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S)
        self._num_running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_running -= 1
