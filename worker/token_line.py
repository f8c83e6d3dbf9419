"""The leader's end of the token lines: a TCP server for the gateways that know the secret.

A gateway sends Requests, Aborts and Polls, and is answered in their order, but for a poll, whose answer may wait for
news. Everything is done by the event loop's callbacks: a token costs nothing, a poll one task.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import ssl
from typing import Protocol, TypeAlias, cast

from .admission import Refusal
from .line_frames import SECRET_BYTES, FrameReader, LineAddress, framed, prepare
from .messages import Abort, Poll, Request, SubmitAnswer, TokenFrame
from .wire import WireError, pack, unpack_any

STRANGER_S = 5.0
"""So long a peer may take to say the secret."""
MOST_STRANGERS = 64
"""So many may be about to; one more, and the one that has taken longest is cut off."""

_Message: TypeAlias = Poll | Request | Abort
_KINDS: tuple[type[_Message], ...] = (Poll, Request, Abort)

logger = logging.getLogger(__name__)


class LineService(Protocol):
    """What gateways ask of a leader. Each call raises RuntimeError when the engine is over."""

    def submit(self, request: Request) -> Refusal | None: ...

    def abort(self, request_ids: tuple[str, ...], branch: int | None) -> None: ...

    async def poll(self, mailbox: str, acknowledged: int, wait_s: float) -> TokenFrame: ...


class TokenLineServer:
    """Listens from ``open`` on. When the engine is over it closes: gateways take that for the leader's death."""

    def __init__(self, service: LineService) -> None:
        self.service = service
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._server: asyncio.Server | None = None
        self._strangers: dict[_GatewayLine, asyncio.TimerHandle] = {}
        self._lines: set[_GatewayLine] = set()

    async def open(self, host: str, tls: ssl.SSLContext | None = None) -> LineAddress:
        """Listen at a free port of ``host`` only. Raises OSError."""
        loop = asyncio.get_running_loop()
        limit_s = None if tls is None else STRANGER_S
        self._server = await loop.create_server(
            lambda: _GatewayLine(self), host, 0, ssl=tls, ssl_handshake_timeout=limit_s, backlog=MOST_STRANGERS
        )
        return LineAddress(host, self._server.sockets[0].getsockname()[1], self.secret)

    def close(self) -> None:
        """Nobody is listened to any more."""
        if self._server is not None:
            self._server.close()
        for line in [*self._strangers, *self._lines]:
            line.close()

    # ---- called by the lines ----

    def has_come(self, line: _GatewayLine) -> None:
        """Somebody has connected."""
        if len(self._strangers) >= MOST_STRANGERS:
            next(iter(self._strangers)).close()
        self._strangers[line] = asyncio.get_running_loop().call_later(STRANGER_S, line.close)

    def is_known(self, line: _GatewayLine) -> None:
        """It has said the secret."""
        self._strangers.pop(line).cancel()
        self._lines.add(line)

    def has_gone(self, line: _GatewayLine) -> None:
        if (timer := self._strangers.pop(line, None)) is not None:
            timer.cancel()
        self._lines.discard(line)


class _GatewayLine(asyncio.Protocol):
    """One connection. Of a peer that has not said the secret no more is kept than a part of it."""

    def __init__(self, server: TokenLineServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._secret: bytes | None = b""
        """What has come of it; None when all of it has, and was right."""
        self._frames = FrameReader()
        self._poll: asyncio.Task[None] | None = None

    def close(self) -> None:
        """What was answered is still sent to a gateway; a stranger is cut off."""
        self._server.has_gone(self)
        if self._transport is not None and self._secret is None:
            self._transport.close()
        elif self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        prepare(transport)
        self._server.has_come(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self._poll is not None:
            self._poll.cancel()
        self._transport = None
        self._server.has_gone(self)

    def data_received(self, data: bytes) -> None:
        if self._secret is not None:
            data = self._greet(self._secret, data)
        if not data or self._transport is None or self._transport.is_closing():
            return
        try:
            for packed in self._frames.feed(data):
                self._handle(unpack_any(packed, _KINDS))
        except WireError as error:
            logger.warning("a gateway is cut off: %s", error)
            self.close()
        except RuntimeError:  # the engine is over
            self._server.close()

    def _greet(self, begun: bytes, data: bytes) -> bytes:
        """What comes after the secret, once that is whole and right."""
        num_missing = SECRET_BYTES - len(begun)
        told = begun + data[:num_missing]
        if len(told) < SECRET_BYTES:
            self._secret = told
            return b""
        if not hmac.compare_digest(told, self._server.secret):
            logger.warning("a peer without the secret is cut off")
            self.close()
            return b""
        self._secret = None
        self._server.is_known(self)
        return data[num_missing:]

    def _handle(self, message: _Message) -> None:
        service = self._server.service
        if isinstance(message, Poll):
            if self._poll is not None and not self._poll.done():
                raise WireError("a second poll before the first was answered")
            self._poll = asyncio.create_task(self._answer(message))
        elif isinstance(message, Request):
            refusal = service.submit(message)
            told = () if refusal is None else (refusal.message, refusal.retry_after_s)
            self._send(SubmitAnswer(message.request_id, *told))
        else:
            service.abort(message.request_ids, message.branch)

    async def _answer(self, poll: Poll) -> None:
        try:
            self._send(await self._server.service.poll(poll.mailbox, poll.acknowledged, poll.wait_s))
        except RuntimeError:  # the engine is over
            self._server.close()
        except Exception:  # the gateway would wait for an answer that does not come
            logger.exception("a poll failed")
            self.close()

    def _send(self, message: TokenFrame | SubmitAnswer) -> None:
        if self._transport is not None:
            self._transport.write(framed(pack(message)))
