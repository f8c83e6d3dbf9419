"""What surrounds every route: the request id, the count of answers, and the last catch of exceptions."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...watch.request_watch import Watching
from ..errors import describe, log_if_unexpected
from ..model_metrics import ModelsMetrics
from .transport import ClientGone

_GONE = 499
"""The status of a request whose client did not wait for an answer, as nginx has it."""

_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id(headers: Headers) -> str:
    """The client's x-request-id if it is short and harmless, else a new one. For logs only: never a key of ours."""
    given = headers.get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else secrets.token_hex(16)


class Envelope:
    """Plain ASGI, since Starlette's BaseHTTPMiddleware would stand between a stream and its client."""

    def __init__(self, app: ASGIApp, metrics: ModelsMetrics, watching: Watching, answers_request_id: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._watching = watching
        self._answers_request_id = answers_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        identity = request_id(headers)
        watch = self._watching.begin(identity, scope["method"], headers)
        scope.setdefault("state", {}).update(request_id=identity, watch=watch, direct_send=send)
        started, status = False, _GONE

        async def send_with_id(message: Message) -> None:
            nonlocal started, status
            if message["type"] == "http.response.start":
                started, status = True, message["status"]
                if self._answers_request_id:
                    MutableHeaders(scope=message)["x-request-id"] = identity
                self._metrics.http_answer(_model(scope), _route(scope), message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            self._metrics.http_answer(_model(scope), _route(scope), _GONE)
        except Exception as error:
            log_if_unexpected(error, identity)
            if started:
                raise
            await describe(error).response()(scope, receive, send_with_id)
        finally:
            watch.end(scope["method"], _route(scope), status)


def _model(scope: Scope) -> str | None:
    """What the endpoint has found out."""
    model: str | None = scope["state"].get("model")
    return model


def _route(scope: Scope) -> str:
    """The pattern of the route, so that the label has few values."""
    return getattr(scope.get("route"), "path", "other")
