"""Large bodies are judged in a process of their own, so that nobody's tokens wait for them.

Parsing and validation hold the interpreter's lock for as long as they take, 1 s for 100 MB. The process is started when
it is first needed, works on one body at a time, in the order of their coming, and is replaced when it dies, takes too
long, or has grown.

Both ends speak over a socket pair: lengths, then a pickle, then the bytes of the body. Only our own processes hold it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.exceptions import HTTPException

from ....worker.errors import Overloaded, Unavailable
from ..errors import ApiError, Refused
from ..request.judging import JudgeRecipe, Judging, T
from .caller import Caller

TIME_LIMIT_S = 30.0
"""For one body, from its handing over to its result."""

MAX_WAITING_BYTES = 256 * 2**20
"""Of bodies that wait or are judged, at a second for 100 MB; alone a body may have any size."""

_RETRY_AFTER_S = 3.0
START_LIMIT_S = 60.0
END_S = 5.0

_HEAD = struct.Struct("!QQ")
_CHUNK_BYTES = 2**20

FAREWELL = b"grown"
"""Beside its last result, from a process that ends."""

Raw = bytes | bytearray

logger = logging.getLogger(__name__)


class BodyWorker:
    """Judges bodies in another process; ``judge`` may be called from one event loop only."""

    def __init__(self, recipes: Sequence[JudgeRecipe], *, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._recipes = tuple(recipes)
        self._time_limit_s = time_limit_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")
        self._child: _Child | None = None
        self._num_bytes = 0
        """Of the bodies that somebody waits for."""
        self._is_closed = False

    async def judge(self, judging: Judging[T], raw: Raw, caller: Caller) -> T:
        """What ``judging`` gives in the process. Raises Refused for its exceptions, HTTPException 413 for a body that
        takes too long, Overloaded where too much waits, Unavailable when the process dies of it."""
        outcome = await self._outcome(pickle.dumps((judging, caller)), [raw])
        match outcome:
            case ApiError():
                raise Refused(outcome)
            case Defect():
                raise RuntimeError(outcome.traceback)
            case _:
                result: T = outcome
                return result

    def close(self) -> None:
        """End the process, also one that is starting; what is under way is given up."""
        self._is_closed = True
        if (child := self._child) is not None:
            child.process.kill()
        self._thread.shutdown(cancel_futures=True)
        self._end()

    async def _outcome(self, request: bytes, body: list[Raw]) -> Any:
        """The executor keeps what it was given, and the frame that waited for it, until their turn comes, also when
        nobody waits any more: so ``body`` is emptied, and has no other name here."""
        num_bytes = len(body[0])
        if self._num_bytes and self._num_bytes + num_bytes > MAX_WAITING_BYTES:
            message = f"Large request bodies of {self._num_bytes} bytes wait to be read, this one would be too much."
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S)
        self._num_bytes += num_bytes
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._exchange, request, body)
        finally:
            self._num_bytes -= num_bytes
            body.clear()

    def _exchange(self, request: bytes, body: list[Raw]) -> Any:
        """On the thread. ``body`` is empty when whoever sent it has left."""
        if (raw := next(iter(body), None)) is None:
            return None
        try:
            return self._ask(request, raw)
        except TimeoutError:
            self._end()
            message = f"The request body takes longer than {self._time_limit_s:g} s to be read."
            raise HTTPException(413, message) from None
        except (OSError, EOFError) as error:
            self._end()
            logger.error("the process for large bodies has died: %r", error)
            raise Unavailable("The process that reads large bodies has died of this one; others go on.") from error

    def _ask(self, request: bytes, raw: Raw) -> Any:
        if self._child is not None and self._child.process.poll() is not None:
            self._end()
        if self._child is None:
            self._child = _Child()
            if self._is_closed:  # since before there was a process to kill
                raise EOFError("closed")
            self._child.start(self._recipes)
        deadline_s = time.monotonic() + self._time_limit_s
        send(self._child.line, request, raw, deadline_s=deadline_s)
        outcome, farewell = receive(self._child.line, deadline_s=deadline_s)
        if farewell:
            self._end()
        return pickle.loads(outcome)

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    """The process. Raises OSError when there can be none."""

    def __init__(self) -> None:
        self.line, theirs = socket.socketpair()
        with theirs:
            # Without -P a folder that the server happens to run in could hide installed packages.
            command = [sys.executable, "-P", "-m", f"{__package__}.body_process", str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def start(self, recipes: Sequence[JudgeRecipe]) -> None:
        """Wait until it is ready. Raises EOFError or OSError when it does not come up."""
        try:
            deadline_s = time.monotonic() + START_LIMIT_S
            send(self.line, pickle.dumps(recipes), b"", deadline_s=deadline_s)
            receive(self.line, deadline_s=deadline_s)
        except TimeoutError as error:
            self.end()
            raise EOFError(f"it was not ready after {START_LIMIT_S:g} s") from error
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        self.line.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)


class Defect:
    """An exception of ours in the process, not of the body's."""

    def __init__(self, traceback: str) -> None:
        self.traceback = traceback


def send(line: socket.socket, message: bytes, body: Raw, *, deadline_s: float | None = None) -> None:
    """Blocks until all is sent; without the interpreter's lock. ``deadline_s`` is on the monotonic clock.

    Raises TimeoutError after it, OSError when the other end is gone.
    """
    view = memoryview(body)
    _set_timeout(line, deadline_s)
    line.sendall(_HEAD.pack(len(message), view.nbytes))
    line.sendall(message)
    line.sendall(view)


def receive(line: socket.socket, *, deadline_s: float | None = None) -> tuple[bytes, bytearray]:
    """The next message and body. Raises as ``send``; EOFError when the other end is gone."""
    message_bytes, body_bytes = _HEAD.unpack(_read(line, _HEAD.size, deadline_s))
    return bytes(_read(line, message_bytes, deadline_s)), _read(line, body_bytes, deadline_s)


def _read(line: socket.socket, num_bytes: int, deadline_s: float | None) -> bytearray:
    content = bytearray(num_bytes)
    view, done = memoryview(content), 0
    while done < num_bytes:
        _set_timeout(line, deadline_s)
        got = line.recv_into(view[done : done + _CHUNK_BYTES])
        if got == 0:
            raise EOFError("the other end is gone")
        done += got
    return content


def _set_timeout(line: socket.socket, deadline_s: float | None) -> None:
    line.settimeout(None if deadline_s is None else max(deadline_s - time.monotonic(), 0.001))
