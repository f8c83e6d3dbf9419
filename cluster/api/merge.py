"""Several asynchronous streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")


class _End:
    """A stream is over, with the exception that ended it."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Items of all streams as they come; the first exception ends all. One stream costs no task."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield item
        return
    queue: asyncio.Queue[T | _End] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            got = await queue.get()
            if not isinstance(got, _End):
                yield got
            elif got.error is not None:
                raise got.error
            else:
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(stream: AsyncIterator[T], queue: asyncio.Queue[T | _End]) -> None:
    try:
        async for item in stream:
            queue.put_nowait(item)
    except Exception as error:
        queue.put_nowait(_End(error))
    else:
        queue.put_nowait(_End(None))
