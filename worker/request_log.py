"""What a worker group logs of requests: that it has them, which trace they belong to, and why they failed. No text."""

from __future__ import annotations

import logging
from typing import Any

from .messages import FinishReason, Request, SequenceUpdate

logger = logging.getLogger(__name__)

_TRACE_ID = 1
"""Its place in a traceparent: version-trace_id-span_id-flags."""


def trace_id(traceparent: str | None) -> str | None:
    """Of a W3C traceparent that was judged before."""
    return None if traceparent is None else traceparent.split("-")[_TRACE_ID]


def log_received(request: Request) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("request received", extra={"fields": _fields(request)})


def _fields(request: Request) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "client_request_id": request.client_request_id,
        "trace_id": trace_id(request.trace),
        "prompt_tokens": len(request.prompt_token_ids),
        "branches": len(request.branches),
        "attempt": request.attempt,
    }


def log_failed(update: SequenceUpdate) -> None:
    """An engine's error; what the request itself asked wrongly is told to the client alone."""
    if update.finish_reason is FinishReason.ERROR and update.param is None:
        fields = {"request_id": update.request_id, "branch": update.branch, "error": update.error}
        logger.error("request failed", extra={"fields": fields})
