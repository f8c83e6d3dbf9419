"""LeaderLine: a gateway's connection to the leader of one worker group, opened again when it is lost.

The other end is ``worker/token_line.py``. What is said on it, and what is said again on a new connection, is
``GroupClient``'s concern.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Protocol, TypeAlias, cast

from ..worker.line_frames import FrameReader, LineAddress, framed, prepare
from ..worker.messages import SubmitAnswer, TokenFrame
from ..worker.wire import WireError, unpack_any
from .silence import Silence

SILENCE_S = 5.0
"""A leader that owes an answer and has not been heard for so long is taken for dead: it answers a poll each second. A
step may take longer; the leader's event loop not."""

_TICK_S = 0.5

Answer: TypeAlias = TokenFrame | SubmitAnswer
_KINDS: tuple[type[Answer], ...] = (TokenFrame, SubmitAnswer)


class LineOwner(Protocol):
    """Told in the event loop's callbacks what becomes of the line."""

    @property
    def awaits_answer(self) -> bool:
        """The leader owes one."""
        ...

    def line_opened(self) -> None:
        """What is still owed to the leader can be sent now; something must be that it answers."""

    def line_received(self, answer: Answer) -> None: ...

    def line_lost(self, error: BaseException) -> None:
        """It cannot be opened, or nothing comes any more: told once, and nothing after it."""


class LeaderLine:
    """``leader`` is the actor's handle. Opened by ``open``; from then on a lost connection is opened again at once.

    A connection that was closed before the leader had said anything is not: its leader does not lead any more.
    """

    def __init__(self, leader: Any, owner: LineOwner, tls: ssl.SSLContext | None) -> None:
        self._leader = leader
        self._owner = owner
        self._tls = tls
        self._address: LineAddress | None = None
        self._connection: _Connection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._is_over = False

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    @property
    def is_over(self) -> bool:
        """It is not opened again."""
        return self._is_over

    def open(self) -> None:
        """Open it, unless it is open, about to be, or over."""
        if self._connection is None and self._opening is None and not self._is_over:
            self._opening = asyncio.create_task(self._open())

    def send(self, packed: bytes) -> None:
        """A packed message, on a line that is open."""
        if self._connection is not None:
            self._connection.send(packed)

    def close(self) -> None:
        """For good. What was sent is still delivered, if somebody takes it."""
        self._is_over = True
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(SILENCE_S):
                if self._address is None:
                    self._address = await self._leader.line_address.remote()
                connection = await self._connect(self._address)
        except Exception as error:  # mostly OSError, RayError, TimeoutError; at any rate nobody else would learn of it
            self._opening = None
            self._fail(self._told(error))
            return
        self._opening = None
        if connection.is_closed:
            self._fail(ConnectionResetError("the leader has closed the line"))
        else:
            self._connection = connection
            self._owner.line_opened()

    def _told(self, error: Exception) -> Exception:
        """A TimeoutError has no words."""
        if not isinstance(error, TimeoutError):
            return error
        what = "told where it listens" if self._address is None else "answered at its address"
        return TimeoutError(f"the leader has not {what} for {SILENCE_S:.0f} s")

    async def _connect(self, address: LineAddress) -> _Connection:
        loop = asyncio.get_running_loop()
        connection = _Connection(self, address.secret)
        await loop.create_connection(lambda: connection, address.host, address.port, ssl=self._tls)
        return connection

    def _fail(self, error: BaseException) -> None:
        if not self._is_over:
            self._is_over = True
            self._owner.line_lost(error)
            self.close()

    # ---- called by the connection ----

    @property
    def awaits_answer(self) -> bool:
        return self._owner.awaits_answer

    def received(self, answer: Answer) -> None:
        if not self._is_over:
            self._owner.line_received(answer)

    def lost(self, connection: _Connection, error: BaseException) -> None:
        """Nothing comes by it any more."""
        if connection is not self._connection:
            return
        if connection.is_closed:
            self._connection = None
        if connection.is_closed and connection.has_heard:
            self.open()
        else:
            self._fail(error)


class _Connection(asyncio.Protocol):
    def __init__(self, line: LeaderLine, secret: bytes) -> None:
        self._line = line
        self._secret = secret
        self._frames = FrameReader()
        self._silence = Silence(SILENCE_S, _TICK_S)
        self.has_heard = False
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        prepare(transport)
        self._transport.write(self._secret)
        self._ticks = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def send(self, packed: bytes) -> None:
        self._transport.write(framed(packed))

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self.has_heard = True
        self._silence.is_over()
        try:
            for packed in self._frames.feed(data):
                self._line.received(unpack_any(packed, _KINDS))
        except WireError as error:
            self._line.lost(self, error)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        self._ticks.cancel()
        self._line.lost(self, error or ConnectionResetError("the leader has closed the line"))

    def _tick(self) -> None:
        if not self._line.awaits_answer:
            self._silence.is_over()
        elif self._silence.lasts_too_long():
            self._line.lost(self, TimeoutError(f"the leader has said nothing for {SILENCE_S:.0f} s"))
            return
        self._ticks = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
