"""Gateway: the ingress deployment. It owns text; the worker groups own token ids."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from starlette.types import Lifespan

from ..worker.checkpoint.store import resolve_model
from ..worker.errors import InvalidRequest
from ..worker.line_tls import gateway_context
from ..worker.logs import configure_logs
from ..worker.routing_hash import RoutingHasher
from .api.http.app import build_app
from .api.http.body_worker import BodyWorker
from .api.model_metrics import ModelsMetrics
from .api.request.judging import JudgeRecipe, judges_of
from .data_plane import ClusterService
from .environment import ray_tls
from .plan import NAMESPACE, ClusterPlan, ServePlan, router_names, served_model
from .router_client import RouterClient
from .router_lines import RouterAway
from .send_buffers import SmallSendBuffers
from .serve_ports import keep_calls_on_the_node
from .trace_recorder import TraceRecorder
from .way_in import WayIn

METRICS_PERIOD_S = 1.0

logger = logging.getLogger("ray.serve")


@serve.ingress()
class Gateway:
    """One replica. The handles of the other deployments only bind the application together."""

    async def __init__(self, plan: ClusterPlan, routers: Any, *groups: Any) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        keep_calls_on_the_node()
        self._id = uuid.uuid4().hex[:12]
        who = {"role": "gateway", "gateway": self._id}
        configure_logs(plan.config.log_level, plan.config.log_format, who, logger="octavo")
        recipes = [await asyncio.to_thread(self._recipe, model) for model in plan.models]
        self._judges = await asyncio.to_thread(judges_of, recipes)
        self._texts = [self._judges.named(model.name).text for model in self._judges.models]
        for text in self._texts:
            logger.info(text.template_support.summary())
        self._http = plan.config
        self._body_worker = BodyWorker(recipes)
        self._metrics = ModelsMetrics([model.name for model in self._judges.models], self._id)
        app_name = serve.get_replica_context().app_name
        names = router_names(app_name, plan.config.num_routers)
        self._router = RouterClient(self._id, [functools.partial(ray.get_actor, name, NAMESPACE) for name in names])
        hasher = RoutingHasher(plan.routing_key, plan.config.block_size)
        self._recorders = await asyncio.to_thread(self._start_recording, plan, asyncio.get_running_loop().time)
        tls = None if (files := ray_tls()) is None else gateway_context(files)
        way_in = WayIn(app_name)
        self._service = ClusterService(self._id, self._router, hasher, self._metrics, self._recorders, tls, way_in)

    @staticmethod
    def _recipe(plan: ServePlan) -> JudgeRecipe:
        folder = resolve_model(plan.model, cache_dir=plan.config.cache_dir, report=logger.info).path
        return JudgeRecipe(folder, served_model(plan, folder), plan.chat_template, plan.chat_options)

    def _start_recording(self, plan: ClusterPlan, clock: Callable[[], float]) -> dict[str, TraceRecorder]:
        """A file for each model: a trace is of requests that could have gone to the same worker groups."""
        path = plan.config.record_trace
        if path is None:
            return {}
        recorders = {}
        for model in self._metrics.models:
            on_lost = self._metrics[model].unrecorded.inc
            recorder = TraceRecorder(
                path, plan.config.block_size, secret=plan.routing_key, clock=clock, on_lost=on_lost
            )
            logger.info("recording requests for %s in %s", model, recorder.path)
            recorders[model] = recorder
        return recorders

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = build_app(
            self._service,
            self._judges,
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
        for recorder in self._recorders.values():
            await asyncio.to_thread(recorder.close)
        await asyncio.to_thread(self._body_worker.close)
        for text in self._texts:
            await asyncio.to_thread(text.close)  # waits for templates under way

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        recording = [recorder.run() for recorder in self._recorders.values()]
        return [
            self._service.groups.run(),
            self._report_metrics(),
            self._load_grammars(),
            self._metrics.lag.run(),
            *recording,
        ]

    async def _load_grammars(self) -> None:
        """Before requests are there: it stops the event loop for a part of a second. A tokenizer that grammars cannot
        use is told to the requests that want one."""
        for text in self._texts:
            with contextlib.suppress(InvalidRequest):
                await asyncio.to_thread(text.grammars.load)

    async def _report_metrics(self) -> None:
        """The routers keep every gateway's metrics, so that each of them can answer for the whole cluster."""
        while True:
            await asyncio.sleep(METRICS_PERIOD_S)
            with contextlib.suppress(RouterAway):
                await self._router.report_metrics(self._metrics.text())
