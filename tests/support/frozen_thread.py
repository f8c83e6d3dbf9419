"""A thread of another process that stands still as in a collective that never ends, while its process answers."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

import psutil
from serve_process import wait_until

PTRACE_INTERRUPT = 0x4207
PTRACE_SEIZE = 0x4206
WAIT_FOR_ALL = 0x40000000
"""``__WALL``: threads too."""

BUSY_S = 0.3
"""CPU time by which the thread that computes stands out."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_LIBC.ptrace.restype = ctypes.c_long


def busiest_thread(processes: list[psutil.Process]) -> tuple[psutil.Process, int]:
    """The thread of these processes that computes most from now on, with its process."""
    before = _cpu_times(processes)
    gains: dict[tuple[psutil.Process, int], float] = {}

    def is_clear() -> bool:
        gains.update({key: time_s - before.get(key, 0.0) for key, time_s in _cpu_times(processes).items()})
        return max(gains.values()) > BUSY_S

    wait_until(is_clear, timeout_s=30, what="a thread that computes")
    return max(gains, key=lambda key: gains[key])


def _cpu_times(processes: list[psutil.Process]) -> dict[tuple[psutil.Process, int], float]:
    return {(process, thread.id): thread.user_time for process in processes for thread in process.threads()}


@contextlib.contextmanager
def frozen(thread: int) -> Iterator[None]:
    """The thread, of a process that is a descendant of this one, stands still; at the end it is waited for until it has
    been killed."""
    _ptrace(PTRACE_SEIZE, thread)
    _ptrace(PTRACE_INTERRUPT, thread)
    os.waitpid(thread, WAIT_FOR_ALL)
    yield
    with contextlib.suppress(ChildProcessError):
        os.waitpid(thread, WAIT_FOR_ALL)  # its process cannot end before its end has been seen


def _ptrace(request: int, thread: int) -> None:
    if _LIBC.ptrace(request, thread, None, None) == -1:
        raise OSError(ctypes.get_errno(), f"ptrace of thread {thread}")
