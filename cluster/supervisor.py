"""The process that a user starts, apart from the one that does the work.

Signals meant for a server are often sent to its whole process group: by a terminal's Ctrl-C, by ``timeout``, by service
managers. Ray's own processes would be among those that get them, and die before the application on them is drained. So
the work is done in a child in a session of its own; this process hands on each signal once, waits, and sees to it that
nothing is left, whatever the child's end. If it is killed itself, the child gets SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import Any

from .local_ray import adopt_orphans, no_process_left

_PR_SET_PDEATHSIG = 1


def become_child() -> None:
    """Returns in a child process that is to do the work; the calling process waits for it and exits as it does."""
    adopt_orphans()
    child = os.fork()
    if child == 0:
        os.setsid()
        end_with_parent()
        return
    raise SystemExit(_wait_for(child))


def _wait_for(child: int) -> int:
    """Hand on signals until the child has ended; its exit code."""

    def hand_on(number: int, _: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, hand_on)
    with no_process_left():
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def end_with_parent() -> None:
    """SIGTERM for this process when its parent dies (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
