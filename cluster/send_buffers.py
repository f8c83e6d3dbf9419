"""How much of an answer the kernel takes before the gateway notices that nobody reads it.

Linux lets a connection on the loopback interface hold 2.5 to 4 MB that was written and not read, half an hour of a
slow stream. Serve opens the gateway's port itself and has no setting for it, so its socket is looked up by the port.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from starlette.types import ASGIApp, Receive, Scope, Send

SEND_BUFFER_BYTES = 64 * 1024
"""The kernel doubles it for its own needs. Enough for 1 MB/s over 60 ms."""


class SmallSendBuffers:
    """Limits what connections of the port that requests come in by may hold, with the first request on it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._ports: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = scope.get("server")
        if server is not None and server[1] is not None and server[1] not in self._ports:
            self._ports.add(server[1])
            limit_send_buffers(server[1])
        await self._app(scope, receive, send)


def limit_send_buffers(port: int) -> int:
    """Of this process's sockets with that local port, and of all connections that will come by a listening one of them;
    how many there were."""
    num_found = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):  # a copy of anything else would never be closed
                num_found += _limit(descriptor, port)
    return num_found


def _limit(descriptor: int, port: int) -> bool:
    """Whether the socket has that local port. Raises OSError for one that was closed meanwhile."""
    with socket.socket(fileno=os.dup(descriptor)) as line:
        if line.family not in (socket.AF_INET, socket.AF_INET6) or line.getsockname()[1] != port:
            return False
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        return True
