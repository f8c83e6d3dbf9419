"""What a rank's process does about its own end: nothing of it outlives its node's Ray, and its stacks can be had."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys

import psutil

STACKS_SIGNAL = signal.SIGUSR1
"""Lets a rank write the stacks of all its threads to its log, also while one holds the interpreter's lock."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """SIGKILL for this process when its parent, the node's Ray, dies (Linux); at once when it is dead already.

    Ray's own way takes seconds, and a stopped process has none: a new Ray on the node would hand out a GPU that is
    still in use.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def write_stacks() -> None:
    """All threads' stacks to stderr, which is the rank's log."""
    with contextlib.suppress(OSError, ValueError):  # stderr that is no file
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


def write_stacks_on_signal() -> None:
    """From now on ``STACKS_SIGNAL`` does so too."""
    with contextlib.suppress(OSError, ValueError):
        faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True)


def process_start_s() -> float:
    """Start of this process, seconds since the epoch: with the process's number it names it for ever."""
    return float(psutil.Process().create_time())
