"""RankMetrics: what one rank says of its process and its GPU, as text that the leader's report carries."""

from __future__ import annotations

import asyncio

from prometheus_client.registry import Collector

from .gpu_metrics import GpuMetrics
from .process_metrics import LoopLag, ProcessMetrics, render


class RankMetrics:
    """Labels ``model_name``, ``group``, ``rank`` and ``role``. ``gpu_uuid`` None: it computes on a CPU."""

    def __init__(self, model: str, group: str, rank: int, gpu_uuid: str | None = None) -> None:
        labels = {"role": "worker", "model_name": model, "group": group, "rank": str(rank)}
        self.lag = LoopLag()
        self._collectors: list[Collector] = [ProcessMetrics(labels, self.lag)]
        if gpu_uuid is not None:
            gpu_labels = {name: labels[name] for name in ("model_name", "group", "rank")}
            self._collectors.append(GpuMetrics(gpu_uuid, gpu_labels))

    async def text(self) -> str:
        """Prometheus text. NVML takes milliseconds: it is asked in a thread."""
        return await asyncio.to_thread(render, *self._collectors)
