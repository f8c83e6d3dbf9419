"""Gateway: the ingress deployment. It owns text; the worker groups own token ids."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from starlette.types import Lifespan

from ..worker.checkpoint.store import resolve_model
from ..worker.errors import InvalidRequest
from ..worker.routing_hash import RoutingHasher
from .api.http.app import build_app
from .api.http.body_worker import BodyWorker
from .api.metrics import GatewayMetrics
from .api.request.judging import JudgeRecipe
from .data_plane import ClusterService
from .plan import NAMESPACE, ServePlan, router_names, served_model
from .router_client import RouterClient
from .router_lines import RouterAway
from .send_buffers import SmallSendBuffers
from .trace_recorder import TraceRecorder

METRICS_PERIOD_S = 1.0

logger = logging.getLogger("ray.serve")


@serve.ingress()
class Gateway:
    """One replica. The handles of the other deployments only bind the application together."""

    async def __init__(self, plan: ServePlan, routers: Any, groups: Any) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self._id = uuid.uuid4().hex[:12]
        folder = await asyncio.to_thread(self._model_folder, plan)
        self._info = served_model(plan, folder)
        recipe = JudgeRecipe(folder, self._info, plan.chat_template, plan.chat_options)
        self._text = await asyncio.to_thread(recipe.text)
        logger.info(self._text.template_support.summary())
        self._http = plan.config
        self._body_worker = BodyWorker(recipe)
        self._metrics = GatewayMetrics(self._info.name, self._id)
        names = router_names(serve.get_replica_context().app_name, plan.config.num_routers)
        self._router = RouterClient(self._id, [functools.partial(ray.get_actor, name, NAMESPACE) for name in names])
        hasher = RoutingHasher(plan.routing_key, plan.config.block_size)
        self._recorder = await asyncio.to_thread(self._start_recording, plan, asyncio.get_running_loop().time)
        self._service = ClusterService(self._id, self._router, hasher, self._metrics, self._recorder)

    @staticmethod
    def _model_folder(plan: ServePlan) -> Path:
        return resolve_model(plan.model, cache_dir=plan.config.cache_dir, report=logger.info).path

    def _start_recording(self, plan: ServePlan, clock: Callable[[], float]) -> TraceRecorder | None:
        path, on_lost = plan.config.record_trace, self._metrics.unrecorded.inc
        if path is None:
            return None
        recorder = TraceRecorder(path, plan.config.block_size, secret=plan.routing_key, clock=clock, on_lost=on_lost)
        logger.info("recording requests in %s", recorder.path)
        return recorder

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = build_app(
            self._service,
            self._text,
            self._info,
            http=self._http,
            metrics=self._metrics,
            body_worker=self._body_worker,
            answers_request_id=False,
        )
        app.add_middleware(SmallSendBuffers)
        app.router.lifespan_context = functools.partial(self._lifespan, app.router.lifespan_context)
        return app

    @asynccontextmanager
    async def _lifespan(self, of_app: Lifespan[Any], app: FastAPI) -> AsyncIterator[None]:
        """What runs beside the requests, on their event loop; ``of_app`` is the application's own."""
        tasks = [asyncio.create_task(work) for work in self._background()]
        async with of_app(app):
            yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        await asyncio.to_thread(self._body_worker.close)
        await asyncio.to_thread(self._text.close)  # waits for templates under way

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        recording = [] if self._recorder is None else [self._recorder.run()]
        return [self._service.groups.run(), self._report_metrics(), self._load_grammars(), *recording]

    async def _load_grammars(self) -> None:
        """Before requests are there: it stops the event loop for a part of a second. A tokenizer that grammars cannot
        use is told to the requests that want one."""
        with contextlib.suppress(InvalidRequest):
            await asyncio.to_thread(self._text.grammars.load)

    async def _report_metrics(self) -> None:
        """The routers keep every gateway's metrics, so that each of them can answer for the whole cluster."""
        while True:
            await asyncio.sleep(METRICS_PERIOD_S)
            with contextlib.suppress(RouterAway):
                await self._router.report_metrics(self._metrics.text())
