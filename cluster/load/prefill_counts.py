"""What a cluster's groups say they computed of prompts, from ``/metrics``: preempted work counts again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..watch.top.samples import Samples
from .client import Client

_QUERIES, _HITS = "octavo_prefix_cache_queries_total", "octavo_prefix_cache_hits_total"
_TIMEOUT_S, _PAUSE_S = 10.0, 0.2


@dataclass(frozen=True, slots=True)
class PrefillCounts:
    """Prompt tokens by group, of all that are there."""

    queried: Mapping[str, float]
    hits: Mapping[str, float]

    @property
    def computed(self) -> dict[str, float]:
        return {group: tokens - self.hits.get(group, 0.0) for group, tokens in self.queried.items()}

    @property
    def hit_rate(self) -> float:
        return sum(self.hits.values()) / max(1.0, sum(self.queried.values()))

    @property
    def imbalance(self) -> float:
        """What the busiest group computed, by the mean."""
        computed = list(self.computed.values())
        return max(computed) * len(computed) / max(1.0, sum(computed))

    def since(self, before: PrefillCounts) -> PrefillCounts:
        return PrefillCounts(_less(self.queried, before.queried), _less(self.hits, before.hits))


def _less(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {group: tokens - before.get(group, 0.0) for group, tokens in now.items()}


async def read_counts(client: Client) -> PrefillCounts:
    samples = Samples(await client.ask_text("/metrics"))
    queried, hits = ({labels["group"]: value for labels, value in samples.series(name)} for name in (_QUERIES, _HITS))
    return PrefillCounts(queried, hits)


async def read_grown_counts(client: Client, before: PrefillCounts, num_prompt_tokens: int) -> PrefillCounts:
    """What was counted since, when groups have reported so many prompt tokens: they do once a second."""
    end_s = time.perf_counter() + _TIMEOUT_S
    while True:
        grown = (await read_counts(client)).since(before)
        if sum(grown.queried.values()) >= num_prompt_tokens or time.perf_counter() > end_s:
            return grown
        await asyncio.sleep(_PAUSE_S)
