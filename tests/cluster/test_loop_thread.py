"""An event loop in a thread: every call of it comes back, whatever happens to the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from octavo.cluster.offline.loop_thread import LoopThread

PATIENCE_S = 10.0


def test_what_runs_when_it_is_closed_is_cancelled_and_what_comes_later_is_refused() -> None:
    """Something is slow to end, so that there is time to come too late."""
    thread = LoopThread("tested")
    running, ending, may_end = threading.Event(), threading.Event(), threading.Event()

    async def slow_to_end() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            while not may_end.is_set():
                await asyncio.sleep(0.001)

    async def endless() -> None:
        await asyncio.Event().wait()

    outcomes: dict[str, str] = {}

    def call(name: str) -> None:
        try:
            thread.run(slow_to_end() if name == "first" else endless())
        except RuntimeError as error:
            outcomes[name] = str(error)

    callers = [threading.Thread(target=call, args=(name,), daemon=True) for name in ("first", "late")]
    callers[0].start()
    assert running.wait(PATIENCE_S)
    closer = threading.Thread(target=thread.close, daemon=True)
    closer.start()
    assert ending.wait(PATIENCE_S)
    callers[1].start()
    callers[1].join(PATIENCE_S)
    may_end.set()
    for each in (callers[0], closer):
        each.join(PATIENCE_S)
    assert outcomes == {"first": "it was closed meanwhile", "late": "it was closed"}


def test_closing_it_again_is_harmless() -> None:
    thread = LoopThread("tested")
    thread.close()
    thread.close()
    work = asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="closed"):
        thread.run(work)


def test_it_cannot_wait_for_itself() -> None:
    thread = LoopThread("tested")

    async def nested() -> None:
        thread.run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="from within"):
        thread.run(nested())
    thread.close()
