"""The OpenAI-compatible HTTP API over a ``GenerationService``: routes, and nothing else.

``build_app`` makes a new application with all of its state inside, so that each gateway replica builds its own.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse

from ....worker.errors import OctavoError
from ...http_config import HttpConfig
from ...page.endpoint import add_page
from ...watch.request_watch import Watching
from ...watch.tracing import open_tracing
from ..answer.embedding_answer import embedding_answer
from ..answer.responses import AnswerFormat, ChatFormat, CompletionFormat, StreamedAnswer, answer_format, whole_answer
from ..answer.run import QUEUED, Run, StartingRun
from ..errors import describe
from ..model_metrics import ModelsMetrics
from ..request import judging
from ..request.judges import Judges
from ..service import GenerationService
from ..text.processor import TextProcessor
from .auth import ApiKeys, RequireKey
from .bodies import Bodies
from .body_worker import BodyWorker
from .docs_page import docs_page
from .limits import Limits
from .middleware import Envelope
from .openapi import openapi
from .operations import GET, add_models, add_operations, json_response
from .tokens_endpoints import add_tokens_endpoints
from .transport import EventStream, until_disconnect

AskedT = TypeVar("AskedT", bound=judging.Asked | judging.AskedEmbedding)

_CHAT = "/v1/chat/completions"
_COMPLETION = "/v1/completions"
_EMBEDDING = "/v1/embeddings"
_SHOWN_TO_PAGES = (
    *("x-request-id", "retry-after", "x-should-retry", "x-octavo-group", "x-octavo-cached-tokens"),
    *("x-octavo-route-reason", "x-octavo-expected-ttft-ms", "x-octavo-queue-ms"),
)
"""Headers of answers that scripts of web pages may read: OpenAI's client for browsers goes by the first three."""


def build_app(
    service: GenerationService,
    judges: Judges,
    *,
    http: HttpConfig | None = None,
    metrics: ModelsMetrics | None = None,
    body_worker: BodyWorker | None = None,
    answers_request_id: bool = True,
) -> FastAPI:
    """The application of one gateway: ``judges`` are those of the models that it serves, and theirs alone.

    ``http`` has its limits and who may use it; TLS is not the application's. ``metrics`` are the gateway's own, made
    here if the caller has no use for them; ``GET /metrics`` merges them with ``service.metrics_text()``, which
    therefore must not contain them. Without a ``body_worker`` large bodies are judged in this process.
    ``answers_request_id`` is False where the server around the app adds x-request-id, as Ray Serve does. The lifespan
    ends what the application has started by itself, not what it was given.

    Raises ConfigurationError when the file of API keys cannot be read.
    """
    http = http or HttpConfig()
    metrics = metrics or ModelsMetrics([model.name for model in judges.models], gateway="alone")
    watching = Watching(open_tracing(http.otlp_traces_endpoint), keeps_text=http.log_requests)
    lifespan = _closing(judges, watching)
    app = FastAPI(
        title="Octavo", version=version("octavo"), openapi_url=None, lifespan=lifespan, redirect_slashes=False
    )
    _add_middleware(app, http, metrics, watching, answers_request_id)
    _add_error_handlers(app)
    add_operations(app, service, metrics, with_vllm_names=http.vllm_metric_names)
    add_models(app, judges)
    max_bytes, timeout_s = int(http.max_body_bytes), http.slow_client_timeout_s
    bodies = Bodies(judges, body_worker, max_bytes=max_bytes, timeout_s=timeout_s)
    endpoints = _Generations(service, judges, bodies, metrics, http)
    app.add_api_route(_CHAT, endpoints.chat, methods=["POST"])
    app.add_api_route(_COMPLETION, endpoints.completion, methods=["POST"])
    app.add_api_route(_EMBEDDING, endpoints.embedding, methods=["POST"])
    add_tokens_endpoints(app, bodies, judges)
    _add_documents(app, judges)
    add_page(app, service, metrics)
    return app


def _closing(judges: Judges, watching: Watching) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(judges.close)
        await asyncio.to_thread(watching.close)

    return lifespan


def _add_middleware(
    app: FastAPI, http: HttpConfig, metrics: ModelsMetrics, watching: Watching, answers_request_id: bool
) -> None:
    """The last one added is the first that a request meets."""
    app.add_middleware(Limits, max_concurrent=http.max_concurrent_requests)
    if http.api_key or http.api_key_file:
        app.add_middleware(RequireKey, keys=ApiKeys(http.api_key, http.api_key_file))
    app.add_middleware(Envelope, metrics=metrics, watching=watching, answers_request_id=answers_request_id)
    if http.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=http.allowed_origins,
            allow_methods=http.allowed_methods,
            allow_headers=http.allowed_headers,
            allow_credentials=http.allow_credentials,
            expose_headers=_SHOWN_TO_PAGES,
        )


class _Generations:
    """The three endpoints that compute."""

    def __init__(
        self,
        service: GenerationService,
        judges: Judges,
        bodies: Bodies,
        metrics: ModelsMetrics,
        http: HttpConfig,
    ) -> None:
        self._service = service
        self._judges = judges
        self._bodies = bodies
        self._metrics = metrics
        self._keepalive_s = http.keepalive_s or None
        self._slow_client_timeout_s = http.slow_client_timeout_s

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, judging.chat, partial(self._generated, request, ChatFormat))

    async def completion(self, request: Request) -> Response:
        return await self._answer(request, judging.completion, partial(self._generated, request, CompletionFormat))

    async def embedding(self, request: Request) -> Response:
        return await self._answer(request, judging.embedding, _embedded)

    async def _answer(
        self,
        request: Request,
        judge: judging.Judging[AskedT],
        answer: Callable[[AskedT, StartingRun], Awaitable[Response]],
    ) -> Response:
        raw = await self._bodies.read(request)
        arrival = time.perf_counter()
        starting: StartingRun | None = None

        async def respond() -> Response:
            nonlocal starting, raw
            body, raw = raw, bytearray()  # a large one must not live as long as its answer takes
            try:
                asked = await self._bodies.judge(judge, body, request.headers)
            except (OctavoError, ValidationError):
                request.state.model = self._bodies.model_named_in(body)
                raise
            del body
            model = request.state.model = asked.judged.model
            text, metrics = self._text(model), self._metrics[model]
            starting = StartingRun(Run.start(asked.judged, self._service, text, metrics, arrival, request.state.watch))
            return await answer(asked, starting)

        try:
            return await until_disconnect(request, respond())
        except BaseException:
            if starting is not None:  # cancelled before its stream, which ends it otherwise
                starting.abort()
            raise

    def _text(self, model: str) -> TextProcessor:
        return self._judges.named(model).text

    async def _generated(
        self, request: Request, shape: type[AnswerFormat], asked: judging.Asked, starting: StartingRun
    ) -> Response:
        format_ = await answer_format(shape, asked.judged, self._text(asked.judged.model))
        if asked.stream:
            request.state.watch.is_stream = True
            return await self._stream(request, starting, format_)
        run = await starting.run()
        return _json(await whole_answer(run, format_), run)

    async def _stream(self, request: Request, starting: StartingRun, shape: AnswerFormat) -> Response:
        """With the route in its headers, or the error's status; but not later than the first comment is due, so that
        no proxy gives up a request that waits in the router: after that, a refusal is an error event."""
        has_started = await starting.within(self._keepalive_s)
        headers = (await starting.run()).headers() if has_started else {"x-octavo-route-reason": QUEUED}
        answer = StreamedAnswer(starting, shape, request_id=request.state.request_id)
        return EventStream(
            answer.next,
            headers,
            keepalive_s=self._keepalive_s,
            slow_client_timeout_s=self._slow_client_timeout_s,
            on_close=starting.abort,
        )


async def _embedded(asked: judging.AskedEmbedding, starting: StartingRun) -> Response:
    run = await starting.run()
    return _json(await embedding_answer(run, asked.judged.model, asked.encoding_format), run)


def _json(body: bytes, run: Run) -> Response:
    return Response(body, media_type="application/json", headers=run.headers())


def _add_error_handlers(app: FastAPI) -> None:
    async def answer(_: Request, error: Exception) -> Response:
        return describe(error).response()

    async def answer_unrouted(request: Request, error: Exception) -> Response:
        """Starlette's own 404 and 405, in which only the path is of interest, and what there is instead."""
        assert isinstance(error, HTTPException)
        if error.status_code in (404, 405):
            word = "Unknown URL" if error.status_code == 404 else "Method not allowed"
            known = f". {_known_urls(app)}" if error.status_code == 404 else ""
            message = f"{word}: {request.method} {request.url.path}{known}"
            error = HTTPException(error.status_code, message, error.headers)
        return describe(error).response()

    for kind in (OctavoError, ValidationError, orjson.JSONDecodeError):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(HTTPException, answer_unrouted)


def _known_urls(app: FastAPI) -> str:
    paths = {route.path for route in app.routes if isinstance(route, APIRoute)}
    api = sorted(path for path in paths if path.startswith("/v1/") and "{" not in path)
    return f"There are {', '.join(api)}; /docs describes them all."


def _add_documents(app: FastAPI, judges: Judges) -> None:
    """Made when they are first asked for: they take 0.2 s, which no start should."""
    document = functools.cache(lambda: openapi(judges.models))
    app.openapi = document  # type: ignore[method-assign]

    @app.api_route("/openapi.json", methods=GET)
    async def openapi_json(request: Request) -> Response:
        servers = [{"url": request.scope.get("root_path") or "/"}]
        return json_response({**await asyncio.to_thread(document), "servers": servers})

    @app.api_route("/docs", methods=GET)
    async def docs(request: Request) -> Response:
        base_url = str(request.base_url).rstrip("/")
        return HTMLResponse(docs_page(await asyncio.to_thread(document), base_url))
