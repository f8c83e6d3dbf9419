"""LiveView: what the page shows, gathered when a page asks, once for all that do, and never while none is open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from ...worker.errors import Unavailable
from ...worker.pool_state import PoolState
from ...worker.shared_look import SharedLook
from ..api.metrics import merge_metrics
from ..api.model_metrics import ModelsMetrics
from ..api.service import GenerationService
from ..watch.top.overview import Overview, overview
from ..watch.top.samples import Samples, Window
from .decisions import MOST_DECISIONS, shown
from .history import History
from .pace import PERIOD_S, Pace

MOST_POOLS = 16
"""Of a cluster with more groups the first ones are drawn; of the others the numbers are shown."""

AGE_S = 0.75
"""What was gathered so lately is not gathered again."""

MOST_SHARE = 0.05
"""Of a core, for gathering: with hundreds of groups it takes longer, and is done more rarely."""


@dataclass(frozen=True, slots=True)
class _Gathered:
    overview: Overview
    pools: Mapping[str, PoolState | None]
    decisions: Sequence[Mapping[str, Any]] | None
    """None: no router answers."""


class LiveView:
    """One per gateway. ``service`` is the cluster behind it, ``metrics`` the gateway's own."""

    def __init__(
        self, service: GenerationService, metrics: ModelsMetrics, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._clock = clock
        self._history = History()
        self._pace = Pace()
        self._shared = SharedLook(self._gather, AGE_S, clock=clock)

    async def view(self, since: float) -> bytes:
        """As JSON: the cluster now, the points of the curves after ``since`` (Unix time), when to ask again."""
        part = await self._shared.get()
        points = orjson.dumps([list(asdict(point).values()) for point in self._history.since(since)])
        next_s = orjson.dumps(round(self._pace.next_s(self._clock()), 3))
        return b'{"next_s":%b,"points":%b,%b' % (next_s, points, part[1:])

    async def _gather(self) -> bytes:
        """The part that is the same for every page: a JSON object."""
        text, pools, decisions = await asyncio.gather(
            self._service.metrics_text(), self._service.pools(MOST_POOLS), self._decisions()
        )
        packed, cost_s = await asyncio.to_thread(self._pack, text, pools, decisions)
        self._shared.age_s = max(AGE_S, cost_s / MOST_SHARE)
        self._pace.period_s = max(PERIOD_S, self._shared.age_s)
        return packed

    async def _decisions(self) -> list[dict[str, Any]] | None:
        try:
            return [shown(decision) for decision in await self._service.explain(MOST_DECISIONS)]
        except Unavailable:
            return None

    def _pack(
        self, text: str, pools: Mapping[str, PoolState | None], decisions: list[dict[str, Any]] | None
    ) -> tuple[bytes, float]:
        """In a thread, one at a time; with the processor time that it took."""
        begin_s = time.thread_time()
        samples = Samples(merge_metrics([self._metrics.text(), text]))
        window = self._history.add(samples, self._clock(), time.time()) or Window(samples, samples, 1.0)
        packed = orjson.dumps(_content(_Gathered(overview(window, 0.0), pools, decisions)))
        return packed, time.thread_time() - begin_s


def _content(gathered: _Gathered) -> dict[str, Any]:
    seen = gathered.overview
    numbers = {group.group: group for group in seen.groups}
    names = sorted(numbers.keys() | gathered.pools.keys())
    return {
        "models": seen.models,
        "groups": [{"group": name, "numbers": numbers.get(name), "pool": gathered.pools.get(name)} for name in names],
        "num_not_drawn": len(names) - len(gathered.pools),
        "decisions": gathered.decisions,
        "decisions_per_s": seen.decisions_per_s,
    }
