"""LoopThread: an event loop in a thread of its own, for callers that are in none, or in another one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

END_S = 10.0
"""For what was cancelled to end."""


class LoopThread:
    """``run`` may be called from any number of threads at once; those that run an event loop wait as any other."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._lock = threading.RLock()
        """What is started is in the loop's queue before its stop, or is refused. The garbage collector may close it
        while its own thread holds the lock."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What it returns or raises. What interrupts the wait, as Ctrl-C does, cancels it and is raised when it has
        ended. Raises RuntimeError after ``close``, or when that has ended it, and in the loop's own thread."""
        over = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda _: over.set())

        def cancel() -> None:
            tasks[0].cancel()

        with self._lock:
            if self._is_closed or threading.current_thread() is self._thread:  # which would wait for itself
                coroutine.close()
                raise RuntimeError("it was closed" if self._is_closed else "it was called from within")
            self._loop.call_soon_threadsafe(start)
        try:
            over.wait()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # closed meanwhile: all has ended
                self._loop.call_soon_threadsafe(cancel)
            over.wait(END_S)
            raise
        if tasks[0].cancelled():
            raise RuntimeError("it was closed meanwhile")
        return tasks[0].result()

    def close(self) -> None:
        """Cancel what runs and end the thread; harmless when repeated."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:  # as when the garbage collector happens to run there
            self._thread.join(END_S)

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._cancel_all())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
