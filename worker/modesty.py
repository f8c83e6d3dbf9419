"""Modesty: a thread that other ranks' steps go before, as long as there are any."""

from __future__ import annotations

import contextlib
import os
import threading

NICENESS = 4
"""Four tenths of the time that another thread gets which wants the same processor. A rank that got next to nothing
would not come up as long as the others are busy, just when it is missed."""


def be_modest() -> None:
    """The calling thread, and threads that it starts from now on, stand back (Linux). Not to be undone without
    privileges: it is for threads that end when their work is done."""
    me = threading.get_native_id()
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, me, os.getpriority(os.PRIO_PROCESS, me) + NICENESS)
