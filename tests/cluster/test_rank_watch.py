"""Who watches a rank learns of its death at once, and of its silence after some pulses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ray.exceptions import RayActorError, RayTaskError

from octavo.cluster.rank_watch import MOST_MISSED, RankEnd, until_over

PULSE_S = 0.005


class Method:
    """As an actor's handle has it."""

    def __init__(self, method: Callable[[], Awaitable[object]]) -> None:
        self._method = method

    def remote(self) -> asyncio.Future[object]:
        return asyncio.ensure_future(self._method())


class ScriptedRank:
    """Lives until the test says otherwise; answers ``num_answers`` pulses."""

    def __init__(self, num_answers: int = 10_000) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: Exception | None = None
        self.num_answers = num_answers
        self.num_pulses = 0
        self.watch, self.health = Method(self._watch), Method(self._health)

    async def _watch(self) -> None:
        await asyncio.shield(self.end)

    async def _health(self) -> float:
        self.num_pulses += 1
        if self.failure is not None:
            raise self.failure
        if self.num_pulses > self.num_answers:
            await asyncio.Event().wait()
        return 0.0


async def watched(rank: ScriptedRank) -> RankEnd:
    async with asyncio.timeout(10):
        return await until_over(rank, 1, pulse_s=PULSE_S)


async def test_a_rank_that_dies_is_noticed_at_once() -> None:
    rank = ScriptedRank()
    rank.end.set_exception(RayActorError())
    end = await watched(rank)
    assert end.reason is not None
    assert not end.hangs


async def test_one_that_ends_in_order_is_no_failure() -> None:
    rank = ScriptedRank()
    rank.end.set_result(None)
    assert await watched(rank) == RankEnd(None)


async def test_one_that_answers_no_more_is_given_up() -> None:
    rank = ScriptedRank(num_answers=3)
    end = await watched(rank)
    assert end == RankEnd(f"rank 1 has not answered for {MOST_MISSED * PULSE_S:g} s", hangs=True)
    assert rank.num_pulses == 4


async def test_a_leader_that_finds_itself_hung_is_given_up() -> None:
    rank = ScriptedRank()
    rank.failure = RayTaskError("health", "Traceback\nno step has ended for 61 s", RuntimeError("hung"))
    end = await watched(rank)
    assert end.hangs


async def test_as_long_as_it_answers_the_watch_goes_on() -> None:
    rank = ScriptedRank()
    watch = asyncio.ensure_future(watched(rank))
    while rank.num_pulses < 3 * MOST_MISSED:
        await asyncio.sleep(PULSE_S)
    assert not watch.done()
    watch.cancel()
