"""RequestWatch: what is told of one HTTP request when it is over: a line in the access log, and spans.

The line has numbers and names, never what the client or the model said, unless ``--log-requests`` asks for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .tracing import RequestTrace, Tracing

if TYPE_CHECKING:
    from ..api.request.judged import JudgedRequest
    from ..api.request_meter import RequestMeter
    from ..api.service import GenerationRequest

MOST_LOGGED_TOKENS = 256
"""Of a prompt."""

logger = logging.getLogger(__name__)


class Watching:
    """What a gateway tells of its requests. ``keeps_text``: their prompts and outputs too, as far as they go."""

    def __init__(self, tracing: Tracing, *, keeps_text: bool = False) -> None:
        self._tracing = tracing
        self._keeps_text = keeps_text

    def begin(self, request_id: str, method: str, headers: Mapping[str, str]) -> RequestWatch:
        """Only what may compute something has a span: probes and scrapes would be most of them."""
        trace = self._tracing.begin(headers) if method == "POST" else RequestTrace(None)
        return RequestWatch(request_id, trace, keeps_text=self._keeps_text)

    def close(self) -> None:
        """Send what is left; may take seconds."""
        self._tracing.close()


class RequestWatch:
    """``request_id`` is the client's own, or its proxy's."""

    def __init__(self, request_id: str, trace: RequestTrace, *, keeps_text: bool = False) -> None:
        self.request_id = request_id
        self.trace = trace
        self.keeps_text = keeps_text
        self.begun_s = time.perf_counter()
        self.judged: JudgedRequest | None = None
        """None: it was refused before it was known what to generate."""
        self.is_stream = False
        self.meters: Sequence[RequestMeter] = ()
        """One for each prompt that was to be computed."""
        self._decode: Callable[[Sequence[int]], str] | None = None

    def marked(self, judged: JudgedRequest) -> list[GenerationRequest]:
        """The generations, as they are told to the cluster: with this request's id and the span that they belong to."""
        self.judged = judged
        self.trace.model = judged.model
        trace, identity = self.trace.traceparent, self.request_id
        return [replace(each, trace=trace, client_request_id=identity) for each in judged.generations]

    def measured_by(self, meters: Sequence[RequestMeter], decode: Callable[[Sequence[int]], str]) -> None:
        """``decode`` makes text of a prompt's tokens, if that is to be logged."""
        self.meters, self._decode = meters, decode
        if self.keeps_text:
            for meter in meters:
                meter.kept_text = []

    def end(self, method: str, route: str, status: int) -> None:
        """The answer is sent, or its client is gone. Nothing that goes wrong here is the request's concern."""
        try:
            self._log(method, route, status)
            self.trace.end(self, method, route, status)
        except Exception:
            logger.exception("the end of request %s could not be told", self.request_id)

    def _log(self, method: str, route: str, status: int) -> None:
        level = logging.INFO if method == "POST" and route.startswith("/v1/") else logging.DEBUG
        if logger.isEnabledFor(level):
            about = {"request_id": self.request_id, "trace_id": self.trace.trace_id}
            http = {"method": method, "path": route, "status": status, "e2e_s": time.perf_counter() - self.begun_s}
            logger.log(level, "request finished", extra={"fields": about | http | self._computed() | self._texts()})

    def _computed(self) -> dict[str, Any]:
        """Numbers of all prompts together; the worst of them where they do not add up."""
        if self.judged is None:
            return {}
        meters = self.meters
        routes = [route for meter in meters if (route := meter.route) is not None]
        ttfts = [ttft for meter in meters if (ttft := meter.ttft_s) is not None]
        return {
            "id": self.judged.completion_id,
            "model": self.judged.model,
            "stream": self.is_stream,
            "finish_reason": ",".join(dict.fromkeys(meter.reason.value for meter in meters if meter.reason)) or None,
            "prompt_tokens": sum(len(meter.request.prompt_token_ids) for meter in meters),
            "cached_tokens": sum(meter.num_cached_tokens for meter in meters),
            "output_tokens": sum(meter.num_output_tokens for meter in meters),
            "ttft_s": max(ttfts, default=None),
            "router_queue_s": max((route.queued_s for route in routes), default=None),
            "group": ",".join(dict.fromkeys(route.group for route in routes)) or None,
            "attempts": max((route.attempt for route in routes), default=None),
        }

    def _texts(self) -> dict[str, Any]:
        if not self.keeps_text or self._decode is None:
            return {}
        prompts = [self._decode(meter.request.prompt_token_ids[:MOST_LOGGED_TOKENS]) for meter in self.meters]
        return {"prompt": prompts, "output": ["".join(meter.kept_text or ()) for meter in self.meters]}
