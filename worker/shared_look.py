"""SharedLook: the answer to a question that many ask at once, and that costs more than it is worth to ask each time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedLook(Generic[T]):
    """``look`` is called when somebody asks and the last answer is older than ``age_s``: once for all who wait.

    Nothing is done while nobody asks. A failure is told to those who wait for it, and is not kept.
    """

    def __init__(
        self, look: Callable[[], Awaitable[T]], age_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.age_s = age_s
        self._look = look
        self._clock = clock
        self._under_way: asyncio.Task[T] | None = None
        self._last: T | None = None
        self._looked_at_s: float | None = None
        """When the last look began."""

    async def get(self) -> T:
        """What ``look`` gives or raises."""
        if self._last is not None and self._looked_at_s is not None and self._age_s() < self.age_s:
            return self._last
        if self._under_way is None:
            self._under_way = asyncio.create_task(self._look_anew())
            self._under_way.add_done_callback(_retrieve_failure)  # also when nobody waits for it any more
        return await asyncio.shield(self._under_way)  # who stops waiting does not stop it for the others

    def _age_s(self) -> float:
        return self._clock() - (self._looked_at_s or 0.0)

    async def _look_anew(self) -> T:
        self._looked_at_s = self._clock()
        try:
            self._last = await self._look()
            return self._last
        finally:
            self._under_way = None


def _retrieve_failure(task: asyncio.Task[T]) -> None:
    """asyncio complains of a failure that nobody has asked for."""
    if not task.cancelled():
        task.exception()
