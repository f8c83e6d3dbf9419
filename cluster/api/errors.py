"""The one place that turns exceptions into OpenAI error bodies.

| exception | status, code |
|---|---|
| pydantic ``ValidationError``, ``InvalidRequest`` | 400, see ``_VALIDATION_CODES``; the exception's own |
| ``ContextLengthExceeded`` | 400, context_length_exceeded |
| ``orjson.JSONDecodeError`` | 400, invalid_json |
| ``ModelNotFound`` | 404, model_not_found |
| no good key, unknown path, wrong method, unfinished body, too large, not JSON | see ``_HTTP_CODES`` |
| ``Refused`` | what another process had found |
| ``Overloaded`` | 429 with Retry-After and the router's x-octavo-route-reason, rate_limit_exceeded |
| ``Unavailable`` | 503 likewise, service_unavailable |
| ``DeadlineMissed`` | 408, not to be retried, timeout |
| ``GenerationFailed`` | 500, generation_failed |
| anything else | 500 without a word of what happened, internal_error |

The body is ``{"error": {"message", "type", "param", "code"}}``, the type being invalid_request_error, server_error or
rate_limit_error. ``param`` is the path of a field of ours (``messages[0].role``), never the user's content; only an
unknown field is named by the user's own word, shortened.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ...worker.errors import (
    GenerationFailed,
    InvalidRequest,
    ModelNotFound,
    OctavoError,
    Overloaded,
    Unavailable,
)

_HTTP_CODES = {
    401: "invalid_api_key",
    404: "unknown_url",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    431: "headers_too_large",
}
_VALIDATION_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported": "unsupported_value",
}
_MAX_NAME_CHARS = 64
_LOGGER = logging.getLogger(__name__)


class DeadlineMissed(OctavoError):
    """The request's own ``timeout`` ran out before its first token; HTTP 408: the limit is the client's own."""


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error as the client sees it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """The JSON error body; also the payload of an error event in a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, headers=dict(self.headers), media_type="application/json")


class Refused(OctavoError):
    """Another process has judged the request and described what is wrong with it."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


def describe(exception: BaseException) -> ApiError:
    """What the client is told of ``exception``."""
    match exception:
        case ValidationError():
            return _describe_validation(exception)
        case Refused():
            return exception.error
        case InvalidRequest():
            return _bad_request(str(exception), exception.param, exception.code)
        case orjson.JSONDecodeError():
            return _bad_request(f"The request body is not valid JSON: {exception}", None, "invalid_json")
        case ModelNotFound():
            return ApiError(404, str(exception), "invalid_request_error", "model", "model_not_found")
        case Overloaded():
            headers = _retry_headers(exception)
            return ApiError(429, str(exception), "rate_limit_error", None, "rate_limit_exceeded", headers)
        case Unavailable():
            headers = _retry_headers(exception)
            return ApiError(503, str(exception), "server_error", None, "service_unavailable", headers)
        case DeadlineMissed():
            # The OpenAI client would retry it by itself, with a deadline that is just as short.
            return ApiError(
                408, str(exception), "invalid_request_error", "timeout", "timeout", {"x-should-retry": "false"}
            )
        case GenerationFailed():
            return ApiError(500, str(exception), "server_error", None, "generation_failed")
        case HTTPException():
            return _describe_http(exception)
        case _:
            message = "The server met an error of its own; it has been logged with the x-request-id of this answer."
            return ApiError(500, message, "server_error", None, "internal_error")


def log_if_unexpected(exception: BaseException, request_id: str) -> None:
    """Log with its traceback what ``describe`` tells the client nothing of."""
    if not isinstance(exception, (OctavoError, ValidationError, orjson.JSONDecodeError, HTTPException)):
        _LOGGER.error("request %s failed", request_id, exc_info=exception)


def _bad_request(message: str, param: str | None, code: str | None) -> ApiError:
    return ApiError(400, message, "invalid_request_error", param, code or "invalid_value")


def _retry_headers(refusal: Overloaded | Unavailable) -> dict[str, str]:
    headers = {"Retry-After": str(max(1, math.ceil(refusal.retry_after_s)))}
    return headers if refusal.reason is None else headers | {"x-octavo-route-reason": refusal.reason}


def _describe_http(exception: HTTPException) -> ApiError:
    code = _HTTP_CODES.get(exception.status_code)
    headers = exception.headers or {}
    return ApiError(exception.status_code, str(exception.detail), "invalid_request_error", None, code, headers)


def _describe_validation(exception: ValidationError) -> ApiError:
    """Only the first error: the SDKs show one message, and the rest is often its consequence."""
    error = exception.errors(include_url=False)[0]
    kind, param = error["type"], _param(error["loc"])
    if kind == "missing":
        message = f"Missing required field '{param}'."
    elif kind == "extra_forbidden":
        message = f"Unknown field '{param}'."
    else:
        message = f"Invalid value for '{param}': {error['msg']}{_given(error.get('input'))}."
    default = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return _bad_request(message, param, _VALIDATION_CODES.get(kind, default))


def _param(location: Sequence[int | str]) -> str:
    """``("messages", 0, "content", "<parts>", 1, "type")`` → ``messages[0].content[1].type``.

    Names in angle brackets are the branches of our unions (see ``fields.py``), not fields.
    """
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not (part.startswith("<") and part.endswith(">")):
            path += ("." if path else "") + _shortened(part)
    return path or "body"


def _shortened(name: str) -> str:
    name = "".join(c if c.isprintable() else "?" for c in name)
    return name if len(name) <= _MAX_NAME_CHARS else name[:_MAX_NAME_CHARS] + "…"


def _given(value: Any) -> str:
    """The value refused, where it is short and no text of the user's."""
    return f" (given: {orjson.dumps(value).decode()})" if isinstance(value, (bool, int, float)) else ""
