"""Threads that bring up a rank stand back behind those of ranks that run."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from octavo.worker.modesty import NICENESS, be_modest


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_modest_thread_and_those_it_starts_stand_back_and_no_other() -> None:
    before = niceness()
    with ThreadPoolExecutor(1, initializer=be_modest) as modest:
        assert modest.submit(niceness).result() == before + NICENESS
        with modest.submit(ThreadPoolExecutor, 1).result() as others:
            assert modest.submit(lambda: others.submit(niceness)).result().result() == before + NICENESS
    assert niceness() == before
