"""Several asynchronous streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


class _End:
    """A stream is over, with the exception that ended it."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


def merged(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Items of all streams as they come; the first exception ends all, and so does closing it.

    One stream is its own merger: each item passes one generator less. Of several each is a task. They have about one
    item each on its way, so that what comes faster than it is read waits where it can be put together.
    """
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    queue: asyncio.Queue[T | _End] = asyncio.Queue(maxsize=len(streams))
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


async def _pump(stream: AsyncGenerator[T], queue: asyncio.Queue[T | _End]) -> None:
    end = _End(None)
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put(item)
    except Exception as error:
        end = _End(error)
    await queue.put(end)
