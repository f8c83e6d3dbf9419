"""StepThread: carries out one call after the other in a thread of its own, until one fails."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

_Task: TypeAlias = tuple[Callable[[], Any], Future[Any]]


class EarlierFailure(RuntimeError):
    """Not carried out, because a call before it failed; that is the ``__cause__``."""


class StepThread:
    """Calls run in the order of ``submit``. After one has raised, those that follow end with ``EarlierFailure``.

    The thread ends at ``close``, or when nobody has the StepThread any more. It is a daemon, and the interpreter does
    not wait for a call that hangs.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # The thread knows the queue and not this object, so that it does not keep it alive.
        self._thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._tasks.put, None)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """What ``call`` will give. It cannot be cancelled. Raises RuntimeError after ``close``."""
        if not self.is_open:
            raise RuntimeError("the executor was shut down")
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._tasks.put((call, future))
        return future

    @property
    def is_open(self) -> bool:
        """``close`` was not called."""
        return self._end.alive

    def close(self) -> None:
        """End the thread after the calls that were submitted, and wait for that; harmless when repeated."""
        self._end()
        self._thread.join()


def _work(tasks: queue.SimpleQueue[_Task | None]) -> None:
    failure: BaseException | None = None
    while (task := tasks.get()) is not None:
        failure = _carry_out(*task, failure)
        del task  # while it waits, the thread holds on to nothing


def _carry_out(call: Callable[[], Any], future: Future[Any], failure: BaseException | None) -> BaseException | None:
    """The first failure of this call and those before it."""
    if failure is not None:
        error = EarlierFailure(f"a step before it failed: {failure}")
        error.__cause__ = failure
        future.set_exception(error)
        return failure
    try:
        result = call()
    except BaseException as error:  # whoever waits for the result must learn of it, whatever it is
        future.set_exception(error)
        return error
    future.set_result(result)
    return None
