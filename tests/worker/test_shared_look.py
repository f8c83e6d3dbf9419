"""A look that many share: never more often than it may, never while nobody asks, and a failure is nobody's for long."""

from __future__ import annotations

import asyncio

import pytest

from octavo.worker.shared_look import SharedLook


class Counted:
    """Gives the number of the look; each waits until the test lets it go on."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.now = 100.0
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.failure: Exception | None = None
        self.shared = SharedLook(self.look, 0.5, clock=lambda: self.now)

    async def look(self) -> int:
        self.num_looks += 1
        await self.may_end.wait()
        if self.failure is not None:
            raise self.failure
        return self.num_looks


async def test_nothing_is_looked_at_before_somebody_asks() -> None:
    counted = Counted()
    assert counted.num_looks == 0
    assert await counted.shared.get() == 1


async def test_an_answer_is_given_again_until_it_is_old() -> None:
    counted = Counted()
    assert await counted.shared.get() == 1
    counted.now += 0.49
    assert await counted.shared.get() == 1
    counted.now += 0.01
    assert await counted.shared.get() == 2


async def test_those_who_ask_at_once_share_one_look() -> None:
    counted = Counted()
    counted.may_end.clear()
    asking = [asyncio.create_task(counted.shared.get()) for _ in range(9)]
    await asyncio.sleep(0)
    counted.may_end.set()
    assert await asyncio.gather(*asking) == [1] * 9


async def test_one_who_stops_waiting_does_not_stop_it_for_the_others() -> None:
    counted = Counted()
    counted.may_end.clear()
    leaving, staying = (asyncio.create_task(counted.shared.get()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    counted.may_end.set()
    assert await staying == 1
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_a_failure_is_told_and_not_kept() -> None:
    counted = Counted()
    counted.failure = RuntimeError("the engine is over")
    with pytest.raises(RuntimeError, match="the engine is over"):
        await counted.shared.get()
    counted.failure = None
    assert await counted.shared.get() == 2
