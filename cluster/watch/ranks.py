"""The metrics of a group's ranks travel in the leader's report: a group is one source, however many ranks it has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError

RANK_METRICS_PERIOD_S = 5.0


async def share_rank_metrics(workers: Sequence[Any]) -> None:
    """Hand the leader what the other ranks say of themselves, for ever. ``workers`` are the ranks' actors in order.

    A rank that does not answer is another one's concern; its numbers stay as they were.
    """
    leader, *others = workers
    while others:
        await asyncio.sleep(RANK_METRICS_PERIOD_S)
        answers = await asyncio.gather(*[worker.metrics.remote() for worker in others], return_exceptions=True)
        texts = {str(rank): text for rank, text in enumerate(answers, start=1) if isinstance(text, str)}
        try:
            await leader.take_rank_metrics.remote(texts)
        except RayError:
            return  # the group's watchers know
