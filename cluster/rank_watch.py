"""Watching a rank: whoever runs ``until_over`` learns at once when it dies or fails, and soon when it falls silent.

Ray tells of a death. A process that is stopped, or whose node cannot be reached, is noticed because it does not answer;
what answers and does not get on is found by the leader itself (``worker/step_watch.py``).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from .silence import Silence

PULSE_S = 0.5
MOST_MISSED = 6
"""Pulses without an answer after which a rank is given up: 3 s."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """Why a rank is of no use any more."""

    reason: str | None
    """None: it has ended in order."""
    hangs: bool = False
    """It was given up, and may still be there."""


async def until_over(worker: Any, rank: int, *, pulse_s: float = PULSE_S) -> RankEnd:
    """``worker`` is the actor's handle; see ``Worker.watch`` and ``Worker.health``."""
    end = asyncio.ensure_future(_end(worker))
    silence = asyncio.ensure_future(_silence(worker, rank, pulse_s))
    try:
        await asyncio.wait({end, silence}, return_when=asyncio.FIRST_COMPLETED)
        return end.result() if end.done() else silence.result()
    finally:
        end.cancel()
        silence.cancel()


async def _end(worker: Any) -> RankEnd:
    try:
        await worker.watch.remote()
    except RayError as error:
        return RankEnd(_last_line(error))
    return RankEnd(None)


async def _silence(worker: Any, rank: int, pulse_s: float) -> RankEnd:
    silence = Silence(MOST_MISSED * pulse_s, pulse_s)
    answer: asyncio.Future[Any] | None = None
    while True:
        answer = answer or asyncio.ensure_future(worker.health.remote())
        done, _ = await asyncio.wait({answer}, timeout=pulse_s)
        if not done:
            if silence.lasts_too_long():
                return RankEnd(f"rank {rank} has not answered for {MOST_MISSED * pulse_s:g} s", hangs=True)
            continue
        try:
            answer.result()
        except RayError as error:
            return RankEnd(_last_line(error), hangs=True)
        answer = None
        await asyncio.sleep(pulse_s)
        silence.is_over()


def _last_line(error: RayError) -> str:
    return str(error).strip().split("\n")[-1]
