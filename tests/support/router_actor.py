"""A router's actor in this process, as its handle has it: it can die, hang, and lose answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError

from octavo.router.actor import RouterCore

LONG_S = 60.0


class _Method:
    def __init__(self, actor: RouterActor, name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._actor.call(self._name, *args))


class RouterActor:
    """Dies also in the middle of a call. While it hangs, it does what it is asked, and does not answer; so it is with
    the calls for which ``loses(method, arguments)``."""

    def __init__(self, core: RouterCore) -> None:
        self.core = core
        self.died = asyncio.Event()
        self.hangs = False
        self.loses: Callable[[str, tuple[Any, ...]], bool] = lambda method, args: False
        self.num_calls = 0
        self._never = asyncio.Event()

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)

    async def call(self, name: str, *args: Any) -> Any:
        self.num_calls += 1
        answer = asyncio.ensure_future(self._answer(name, *args))
        death = asyncio.ensure_future(self.died.wait())
        await asyncio.wait({answer, death}, return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            answer.cancel()
            raise RayActorError
        death.cancel()
        return await answer

    async def _answer(self, name: str, *args: Any) -> Any:
        if self.died.is_set():
            raise RayActorError
        answer = await getattr(self.core, name)(*args)
        while self.hangs:
            await asyncio.sleep(0.005)
        if self.loses(name, args):
            await self._never.wait()
        return answer


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():
            await asyncio.sleep(0.001)
