"""The OpenAI-compatible HTTP API over a ``GenerationService``: routes, and nothing else.

``build_app`` makes a new application with all of its state inside, so that each gateway replica builds its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from ...worker.errors import OctavoError
from .caller import read_caller
from .debug import last_decisions
from .errors import describe
from .http import EventStream, read_json, until_disconnect
from .metrics import GatewayMetrics, merge_metrics
from .middleware import Envelope
from .requests import JudgedRequest, RequestJudge, check_model
from .responses import AnswerFormat, ChatFormat, CompletionFormat, stream_answer
from .run import QUEUED, Run, StartingRun, collect
from .schemas import ChatCompletionRequest, CompletionRequest, GenerationFields
from .service import GenerationService, ServedModel
from .text import TextProcessor

MAX_BODY_BYTES = 32 * 2**20
KEEPALIVE_S = 10.0
"""Proxies commonly cut connections that are silent for 15 to 60 s."""

_CHAT = "/v1/chat/completions"
_COMPLETION = "/v1/completions"

B = TypeVar("B", bound=GenerationFields)


def build_app(
    service: GenerationService,
    text: TextProcessor,
    info: ServedModel,
    *,
    metrics: GatewayMetrics | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    keepalive_s: float | None = KEEPALIVE_S,
    answers_request_id: bool = True,
) -> FastAPI:
    """The application of one gateway.

    ``metrics`` are the gateway's own, made here if the caller has no use for them; ``GET /metrics`` merges them with
    ``service.metrics_text()``, which therefore must not contain them. ``keepalive_s`` None sends no comments on silent
    streams. ``answers_request_id`` is False where the server around the app adds x-request-id, as Ray Serve does.
    """
    metrics = metrics or GatewayMetrics(info.name, gateway="alone")
    app = FastAPI(title="Octavo", version=version("octavo"), docs_url="/docs", redoc_url=None)
    app.add_middleware(Envelope, metrics=metrics, answers_request_id=answers_request_id)
    _add_error_handlers(app)
    _add_operations(app, service, metrics)
    _add_models(app, info)
    endpoints = _Generations(service, text, info, metrics, max_body_bytes, keepalive_s)
    app.add_api_route(_CHAT, endpoints.chat, methods=["POST"])
    app.add_api_route(_COMPLETION, endpoints.completion, methods=["POST"])
    _describe_bodies(app)
    return app


class _Generations:
    """The two endpoints that generate."""

    def __init__(
        self,
        service: GenerationService,
        text: TextProcessor,
        info: ServedModel,
        metrics: GatewayMetrics,
        max_body_bytes: int,
        keepalive_s: float | None,
    ) -> None:
        self._service = service
        self._text = text
        self._judge = RequestJudge(text, info)
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._keepalive_s = keepalive_s

    async def chat(self, request: Request) -> Response:
        body = await self._read(request, ChatCompletionRequest)
        judge = partial(self._judge.judge_chat, body, read_caller(request.headers))
        return await self._answer(request, body, judge, ChatFormat)

    async def completion(self, request: Request) -> Response:
        body = await self._read(request, CompletionRequest)
        judge = partial(self._judge.judge_completion, body, read_caller(request.headers))
        return await self._answer(request, body, judge, CompletionFormat)

    async def _read(self, request: Request, schema: type[B]) -> B:
        return schema.model_validate(await read_json(request, self._max_body_bytes))

    async def _answer(
        self,
        request: Request,
        body: GenerationFields,
        judge: Callable[[], Awaitable[JudgedRequest]],
        shape: type[AnswerFormat],
    ) -> Response:
        arrival = time.perf_counter()
        starting: StartingRun | None = None

        async def respond() -> Response:
            nonlocal starting
            judged = await judge()
            starting = StartingRun(Run.start(judged, self._service, self._text, self._metrics, arrival))
            format_ = shape(judged.completion_id, judged.model)
            if body.stream:
                return await self._stream(request, starting, format_, body)
            return await _whole(await starting.run(), format_)

        try:
            return await until_disconnect(request, respond())
        except BaseException:
            if starting is not None:  # cancelled before its stream, which ends it otherwise
                starting.abort()
            raise

    async def _stream(
        self, request: Request, starting: StartingRun, shape: AnswerFormat, body: GenerationFields
    ) -> Response:
        """With the route in its headers, or the error's status; but not later than the first comment is due, so that
        no proxy gives up a request that waits in the router: after that, a refusal is an error event."""
        has_started = await starting.within(self._keepalive_s)
        headers = (await starting.run()).headers() if has_started else {"x-octavo-route-reason": QUEUED}
        wants_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        events = stream_answer(starting, shape, include_usage=wants_usage, request_id=request.state.request_id)
        return EventStream(events, headers, keepalive_s=self._keepalive_s, on_close=starting.abort)


async def _whole(run: Run, shape: AnswerFormat) -> Response:
    texts, reasons = await collect(run)
    body = shape.answer(texts, reasons, run.usage())
    return Response(body, media_type="application/json", headers=run.headers())


def _add_operations(app: FastAPI, service: GenerationService, metrics: GatewayMetrics) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """This gateway's process is alive; it says nothing of the model."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        """200 when a request can be answered now, else 503; the reason is for people."""
        state = await service.readiness()
        return _json({"ready": state.ready, "reason": state.reason}, 200 if state.ready else 503)

    @app.get("/metrics")
    async def metrics_text() -> Response:
        """Prometheus text for the whole cluster."""
        cluster = await service.metrics_text()
        merged = await asyncio.to_thread(merge_metrics, [metrics.text(), cluster])
        return Response(merged, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/debug/route")
    async def debug_route(request: Request) -> Response:
        """The routers' last decisions; see ``debug.py``."""
        return _json({"decisions": await last_decisions(service, request.query_params)})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """All worker groups forget what no request uses; group → number of blocks, null for one without an answer."""
        return _json({"blocks_forgotten": dict(await service.reset_prefix_cache())})

    @app.get("/version")
    async def octavo_version() -> dict[str, str]:
        return {"version": version("octavo")}


def _add_models(app: FastAPI, info: ServedModel) -> None:
    card = {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "octavo",
        "max_model_len": info.max_model_len,
    }

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        check_model(model, info)
        return _json(card)


def _add_error_handlers(app: FastAPI) -> None:
    async def answer(_: Request, error: Exception) -> Response:
        return describe(error).response()

    async def answer_unrouted(request: Request, error: Exception) -> Response:
        """Starlette's own 404 and 405, in which only the path is of interest."""
        assert isinstance(error, HTTPException)
        if error.status_code in (404, 405):
            word = "Unknown URL" if error.status_code == 404 else "Method not allowed"
            error = HTTPException(error.status_code, f"{word}: {request.method} {request.url.path}", error.headers)
        return describe(error).response()

    for kind in (OctavoError, ValidationError, orjson.JSONDecodeError):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(HTTPException, answer_unrouted)


def _describe_bodies(app: FastAPI) -> None:
    """Put the request schemas into /openapi.json when it is first asked for: they take 0.2 s, which no start should.

    FastAPI cannot do it, since bodies are judged by the rules of ``errors.py`` and not by FastAPI's.
    """
    without_bodies = app.openapi

    def openapi() -> dict[str, Any]:
        document = without_bodies()
        for path, schema in ((_CHAT, ChatCompletionRequest), (_COMPLETION, CompletionRequest)):
            content = {"application/json": {"schema": schema.model_json_schema()}}
            document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")
