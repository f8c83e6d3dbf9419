"""Spans of requests, by OpenTelemetry, and the W3C ``traceparent`` that is passed through where there are none.

A request is one span at its gateway, with the attributes of the conventions for generative AI and vLLM's for latencies.
Its prompts' ways are spans below it: route (the router's queue with it), queue, prefill, decode; where a worker group
was lost, failover and again queue, prefill and decode at the next one. They are made when the request is over, of what
was measured anyway, with the gateway's clock: the worker group tells how long its phases took. So nothing is done for
them where no endpoint is set, and clocks of machines need not agree.
"""

from __future__ import annotations

import importlib.util
import re
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...worker.errors import ConfigurationError
from ...worker.request_log import trace_id

if TYPE_CHECKING:
    from ..api.request_meter import Part, RequestMeter
    from .request_watch import RequestWatch

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_FLUSH_S = 3.0

Attributes = dict[str, Any]


def check_tracing() -> None:
    """Raises ConfigurationError where the packages are missing that make and send spans."""
    if not all(map(_is_there, _NEEDED)):
        raise ConfigurationError(
            "--otlp-traces-endpoint needs OpenTelemetry's packages, which are not installed: pip install 'octavo[otel]'"
        )


def _is_there(module: str) -> bool:
    """Without importing what is looked for, but for the packages that it is in."""
    parts = module.split(".")
    return all(importlib.util.find_spec(".".join(parts[:end])) for end in range(1, len(parts) + 1))


class RequestTrace:
    """Which trace a request belongs to. This one makes no span: it passes on what the client sent."""

    def __init__(self, traceparent: str | None) -> None:
        self.traceparent = traceparent
        """Of the span that the cluster's part of the request is below."""
        self.model: str | None = None

    @property
    def trace_id(self) -> str | None:
        return trace_id(self.traceparent)

    def end(self, watch: RequestWatch, method: str, route: str, status: int) -> None:
        """The request is over."""


class Tracing:
    """Begins a trace for each request. This one makes no spans."""

    def begin(self, headers: Mapping[str, str]) -> RequestTrace:
        return RequestTrace(_traceparent(headers))

    def close(self) -> None:
        """Send what is left; may take seconds."""


def open_tracing(endpoint: str | None) -> Tracing:
    """``endpoint`` takes OTLP over HTTP; None: no spans."""
    return Tracing() if endpoint is None else SpanTracing(endpoint)


def _traceparent(headers: Mapping[str, str]) -> str | None:
    given = headers.get("traceparent", "")
    return given if _TRACEPARENT.fullmatch(given) else None


class SpanTracing(Tracing):
    """Sends spans in the background, as far as the endpoint takes them. OpenTelemetry's own environment variables for
    headers, certificates, sampling and resources hold."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider = TracerProvider(resource=Resource.create({"service.name": "octavo"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("octavo")

    def begin(self, headers: Mapping[str, str]) -> RequestTrace:
        return SpanTrace(self._tracer, headers)

    def close(self) -> None:
        """Without a limit of ours this takes half a minute where the endpoint is away."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_FLUSH_S)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class SpanTrace(RequestTrace):
    """The span of one request, below the client's if it sent one."""

    def __init__(self, tracer: Any, headers: Mapping[str, str]) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._epoch_s = time.time() - time.perf_counter()
        parent = TraceContextTextMapPropagator().extract(headers)
        self._span = tracer.start_span("request", parent, kind=SpanKind.SERVER)
        own = self._span.get_span_context()
        super().__init__(f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}")

    def end(self, watch: RequestWatch, method: str, route: str, status: int) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = self._span
        if span.is_recording():
            operation = _OPERATIONS.get(route)
            span.update_name(f"{operation} {self.model}" if operation and self.model else f"{method} {route}")
            span.set_attributes(_of_request(watch, operation, method, route, status))
            if status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            for meter in watch.meters:
                self._add_phases(meter)
        span.end()

    def _add_phases(self, meter: RequestMeter) -> None:
        """One after the other, as far as it came."""
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(self._span)
        for name, begin_s, end_s, attributes in _phases(meter):
            span = self._tracer.start_span(name, context, start_time=self._ns(begin_s), attributes=attributes)
            span.end(self._ns(end_s))

    def _ns(self, reading_s: float) -> int:
        """Of a ``time.perf_counter`` reading, since the epoch."""
        return int((self._epoch_s + reading_s) * 1e9)


def _phases(meter: RequestMeter) -> list[tuple[str, float, float, Attributes]]:
    """(name, begin, end, attributes) of a prompt's phases, by ``time.perf_counter``."""
    route, ended_s = meter.route, meter.ended_s or time.perf_counter()
    prompt: Attributes = {"octavo.request_id": meter.request.request_id}
    if route is None or meter.placed_s is None:
        return [("route", meter.arrival_s, ended_s, prompt)]
    at_end = {"octavo.group": route.group}
    reason = {"octavo.route.reason": route.reason, "octavo.route.queued_s": route.queued_s}
    phases = [("route", meter.arrival_s, meter.placed_s, prompt | at_end | reason)]
    if not meter.parts:
        return [*phases, ("queue", meter.placed_s, ended_s, prompt | at_end)]
    ends_s = [*(part.since_s for part in meter.parts[1:]), ended_s]
    nums = [*(part.num_tokens_before for part in meter.parts[1:]), meter.num_output_tokens]
    for number, (part, end_s, num_tokens) in enumerate(zip(meter.parts, ends_s, nums, strict=True)):
        about = prompt | {"octavo.group": part.group}
        cached = {} if number else {"octavo.cached_tokens": meter.num_cached_tokens}
        queued_s, begun_s, token_s = _times(part, end_s, is_first=number == 0)
        if number:
            phases.append(("failover", part.since_s, queued_s, about))
        phases.append(("queue", queued_s, begun_s, about))
        phases.append(("prefill", begun_s, token_s, about | cached))
        if num_tokens > part.num_tokens_before:
            computed = {"octavo.output_tokens": num_tokens - part.num_tokens_before}
            phases.append(("decode", token_s, end_s, about | computed))
    return phases


def _times(part: Part, end_s: float, *, is_first: bool) -> tuple[float, float, float]:
    """When it came into the group's queue, was begun, and gave its first token there."""
    token_s = min(part.token_s, end_s)
    queued_s = part.since_s if is_first else max(part.since_s, token_s - sum(part.phases))
    return queued_s, min(queued_s + part.phases[0], token_s), token_s


def _of_request(watch: RequestWatch, operation: str | None, method: str, route: str, status: int) -> Attributes:
    attributes: Attributes = {
        "http.request.method": method,
        "http.route": route,
        "http.response.status_code": status,
        "octavo.request_id": watch.request_id,
    }
    if status >= 400:
        attributes["error.type"] = str(status)
    if operation is not None:
        attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "octavo"}
    return attributes | (_of_generation(watch) if watch.meters else {})


def _of_generation(watch: RequestWatch) -> Attributes:
    """The names of OpenTelemetry's conventions for generative AI, and vLLM's for latencies."""
    first, meters = watch.meters[0], watch.meters
    sampling, ttft_s = first.request.sampling, first.ttft_s
    attributes: Attributes = {
        "gen_ai.request.model": first.request.model,
        "gen_ai.response.model": first.request.model,
        "gen_ai.response.id": watch.judged.completion_id if watch.judged else "",
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": first.request.num_branches,
        "gen_ai.response.finish_reasons": [meter.reason.value for meter in meters if meter.reason],
        "gen_ai.usage.input_tokens": sum(len(meter.request.prompt_token_ids) for meter in meters),
        "gen_ai.usage.cache_read.input_tokens": sum(meter.num_cached_tokens for meter in meters),
        "gen_ai.usage.output_tokens": sum(meter.num_output_tokens for meter in meters),
        "gen_ai.latency.e2e": time.perf_counter() - watch.begun_s,
    }
    if ttft_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = ttft_s
    return attributes
