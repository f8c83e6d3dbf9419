"""Gateway: the ingress deployment. It owns text; the worker groups own token ids."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from ..worker.checkpoint.store import resolve_model
from ..worker.model.config import ModelConfig
from ..worker.routing_hash import RoutingHasher
from .api.app import build_app
from .api.metrics import GatewayMetrics
from .api.service import ServedModel
from .api.text import TextProcessor
from .data_plane import ClusterService
from .plan import NAMESPACE, ServePlan, router_name
from .router_client import RouterAway, RouterClient

METRICS_PERIOD_S = 1.0

logger = logging.getLogger("ray.serve")


@serve.ingress()
class Gateway:
    """One replica. The handles of the other deployments only bind the application together."""

    async def __init__(self, plan: ServePlan, router: Any, groups: Any) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self._id = uuid.uuid4().hex[:12]
        folder = await asyncio.to_thread(self._model_folder, plan)
        self._text = await asyncio.to_thread(TextProcessor.load, folder)
        self._info = served_model(plan, folder)
        self._metrics = GatewayMetrics(self._info.name, self._id)
        router_actor = router_name(serve.get_replica_context().app_name)
        self._router = RouterClient(self._id, lambda: ray.get_actor(router_actor, NAMESPACE))
        hasher = RoutingHasher(plan.routing_key, plan.config.block_size)
        self._service = ClusterService(self._id, self._router, hasher, self._metrics)

    @staticmethod
    def _model_folder(plan: ServePlan) -> Path:
        return resolve_model(plan.model, cache_dir=plan.config.cache_dir, report=logger.info).path

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = build_app(self._service, self._text, self._info, metrics=self._metrics, answers_request_id=False)
        app.router.lifespan_context = self._lifespan
        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """What runs beside the requests, on their event loop."""
        tasks = [asyncio.create_task(work) for work in self._background()]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._text.close()

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        return [self._service.run(), self._report_metrics()]

    async def _report_metrics(self) -> None:
        """The router keeps every gateway's metrics, so that each of them can answer for the whole cluster."""
        while True:
            await asyncio.sleep(METRICS_PERIOD_S)
            with contextlib.suppress(RouterAway):
                await self._router.report_metrics(self._metrics.text())


def served_model(plan: ServePlan, folder: Path) -> ServedModel:
    """What the API says of the model. Raises ConfigurationError for a folder that cannot be read."""
    limit = plan.config.max_model_len or ModelConfig.from_folder(folder).max_position_embeddings
    return ServedModel(
        plan.served_model_name,
        limit,
        int(time.time()),
        max_num_seqs=plan.config.max_num_seqs,
        max_output_tokens=plan.config.max_output_tokens,
        scheduling_policy=plan.config.scheduling_policy,
    )
