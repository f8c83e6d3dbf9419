"""The endpoints that operate the server: probes, metrics, decisions of the routers, caches, and the list of models."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from ...watch.vllm_names import vllm_lines
from ..metrics import merge_metrics
from ..model_metrics import ModelsMetrics
from ..request.judges import Judges
from ..service import GenerationService, ServedModel
from .debug import last_decisions
from .profile import profile

GET = ["GET", "HEAD"]


def add_operations(
    app: FastAPI, service: GenerationService, metrics: ModelsMetrics, *, with_vllm_names: bool = False
) -> None:
    def exposition(cluster: str) -> str:
        own = merge_metrics([metrics.text(), cluster])
        return merge_metrics([own, vllm_lines(own)]) if with_vllm_names else own

    @app.api_route("/health", methods=GET)
    async def health() -> Response:
        """This gateway's process is alive; it says nothing of the model."""
        return json_response({"status": "ok"})

    @app.api_route("/ready", methods=GET)
    async def ready() -> Response:
        """200 when a request can be answered now, else 503; the reason is for people."""
        state = await service.readiness()
        return json_response({"ready": state.ready, "reason": state.reason}, 200 if state.ready else 503)

    @app.api_route("/metrics", methods=GET)
    async def metrics_text() -> Response:
        """Prometheus text for the whole cluster."""
        cluster = await service.metrics_text()
        return Response(await asyncio.to_thread(exposition, cluster), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.api_route("/debug/route", methods=GET)
    async def debug_route(request: Request) -> Response:
        """The routers' last decisions; see ``debug.py``."""
        return json_response({"decisions": await last_decisions(service, request.query_params)})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """All worker groups forget what no request uses; group → number of blocks, null for one without an answer."""
        return json_response({"blocks_forgotten": dict(await service.reset_prefix_cache())})

    @app.post("/debug/profile")
    async def debug_profile(request: Request) -> Response:
        """A torch profile of the next steps; see ``profile.py``."""
        return json_response({"groups": await profile(service, request.query_params)})

    @app.api_route("/version", methods=GET)
    async def octavo_version() -> Response:
        return json_response({"version": version("octavo")})


def model_card(info: ServedModel) -> dict[str, Any]:
    """The model as ``/v1/models`` shows it."""
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "octavo",
        "max_model_len": info.max_model_len,
        "sampling_defaults": asdict(info.defaults),
    }


def add_models(app: FastAPI, judges: Judges) -> None:
    @app.api_route("/v1/models", methods=GET)
    async def models() -> Response:
        return json_response({"object": "list", "data": [model_card(info) for info in judges.models]})

    @app.api_route("/v1/models/{model:path}", methods=GET)
    async def model(model: str) -> Response:
        return json_response(model_card(judges.named(model).model))


def json_response(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")
