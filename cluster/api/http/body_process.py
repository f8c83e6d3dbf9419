"""The process that judges large bodies: ``python -m octavo.cluster.api.http.body_process FD``; see ``body_worker``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import sys
import traceback

import orjson
import psutil
from pydantic import ValidationError

from ....worker.errors import OctavoError
from ..errors import describe
from ..request.judges import Judges
from ..request.judging import judges_of
from .body_worker import FAREWELL, Defect, receive, send

NICENESS = 5
"""Whoever waits for tokens comes first."""

MAX_RESIDENT_BYTES = 2**30
"""A process that has grown beyond it ends after its body; a new one takes its place when it is needed."""


def main(line: socket.socket) -> None:
    """Judge what comes over the line, until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    with contextlib.suppress(EOFError, ConnectionError):
        judges = judges_of(pickle.loads(receive(line)[0]))
        send(line, b"", b"")
        me, has_grown = psutil.Process(), False  # ru_maxrss would begin at what the parent has
        while not has_grown:
            outcome = _outcome(judges, *receive(line))
            has_grown = me.memory_info().rss > MAX_RESIDENT_BYTES
            send(line, outcome, FAREWELL if has_grown else b"")


def _outcome(judges: Judges, message: bytes, raw: bytearray) -> bytes:
    judging, caller = pickle.loads(message)
    try:
        return pickle.dumps(asyncio.run(judging(judges, raw, caller)))
    except (OctavoError, ValidationError, orjson.JSONDecodeError) as error:
        return pickle.dumps(describe(error))
    except Exception:
        return pickle.dumps(Defect(traceback.format_exc()))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
