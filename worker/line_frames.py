"""Frames of a token line: the length of a packed message, 4 bytes big endian, and the message.

Ahead of its first frame a gateway sends the secret that the leader's actor has told it.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field

from .wire import WireError

SECRET_BYTES = 32
MOST_FRAME_BYTES = 256 * 1024 * 1024
"""A prompt of a million tokens takes 5 MB; its log-probabilities with twenty alternatives each take the rest."""

HEAD_BYTES = 4
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


@dataclass(frozen=True, slots=True)
class LineAddress:
    """Where a leader listens, and the secret that it wants to see first."""

    host: str
    port: int
    secret: bytes = field(repr=False)


def framed(packed: bytes) -> bytes:
    return len(packed).to_bytes(HEAD_BYTES, "big") + packed


class FrameReader:
    """Cuts what comes into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole now. Raises WireError on one that is too long."""
        if not self._rest and _length(data) == len(data) - HEAD_BYTES:
            return [data[HEAD_BYTES:]]  # nearly always it is just one
        self._rest += data
        messages, start = [], 0
        while (end := start + HEAD_BYTES + _length(self._rest, start)) <= len(self._rest):
            messages.append(bytes(memoryview(self._rest)[start + HEAD_BYTES : end]))
            start = end
        del self._rest[:start]
        return messages


def _length(data: bytes | bytearray, start: int = 0) -> int:
    """Of the message whose frame begins there; with part of its head, the most that there can be."""
    head = data[start : start + HEAD_BYTES]
    length = int.from_bytes(head, "big") if len(head) == HEAD_BYTES else MOST_FRAME_BYTES
    if length > MOST_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes; at most {MOST_FRAME_BYTES} are allowed")
    return length


def prepare(transport: asyncio.BaseTransport) -> None:
    """Send at once, and notice when the other machine is gone although there is nothing to send."""
    line = transport.get_extra_info("socket")
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        line.setsockopt(socket.IPPROTO_TCP, option, value)
