"""What is told of a request when it is over: a line in the log, spans, and its ids on the way to the worker group."""

from __future__ import annotations

import itertools
import json
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from one_model import one_model
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from span_collector import SpanCollector, attributes, span_collector

from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.service import ServedModel, TokenDelta
from octavo.cluster.api.text.processor import TextProcessor
from octavo.cluster.http_config import HttpConfig
from octavo.cluster.watch import tracing
from octavo.cluster.watch.tracing import SpanTracing
from octavo.worker.logs import JsonLines
from octavo.worker.messages import FinishReason

PROMPT = {"model": "smollm2", "prompt": "The quick brown fox"}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """The access log so far, each line as JSON makes it."""
    caplog.set_level(logging.INFO, "octavo.cluster.watch.request_watch")
    form = JsonLines({"role": "gateway"})
    return lambda: [json.loads(form.format(record)) for record in caplog.records if record.msg == "request finished"]


def phased(_: Any) -> list[TokenDelta]:
    return [TokenDelta((500,), num_cached_tokens=3, phases=(0.25, 0.5)), TokenDelta((501,), FinishReason.LENGTH)]


async def test_a_request_leaves_one_line_of_numbers(client: httpx2.AsyncClient, service: Any, lines: Any) -> None:
    service.script = phased
    answer = await client.post("/v1/completions", json={**PROMPT, "max_tokens": 2}, headers={"x-request-id": "mine"})
    (line,) = lines()
    assert line["request_id"] == "mine"
    assert line["id"] == answer.json()["id"]
    names = ("model", "status", "prompt_tokens", "cached_tokens", "output_tokens", "finish_reason", "group", "stream")
    assert [line[name] for name in names] == ["smollm2", 200, 4, 3, 2, "length", "group-1", False]
    assert 0.0 < line["ttft_s"] < line["e2e_s"]
    assert "fox" not in json.dumps(line)


async def test_a_refused_request_leaves_a_line_too(client: httpx2.AsyncClient, lines: Any) -> None:
    await client.post("/v1/completions", json={**PROMPT, "max_tokens": -1})
    await client.get("/health")
    (line,) = lines()
    assert (line["status"], line["path"]) == (400, "/v1/completions")
    assert "output_tokens" not in line


async def test_texts_are_logged_only_when_asked_for_and_cut(
    service: Any, text: TextProcessor, info: ServedModel, lines: Any
) -> None:
    app = build_app(service, one_model(text, info), http=HttpConfig(log_requests=True))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://octavo") as http:
        await http.post("/v1/completions", json=PROMPT)
    (line,) = lines()
    assert (line["prompt"], line["output"]) == (["The quick brown fox"], ["The quick brown fox"])


@pytest.mark.parametrize("given", [TRACEPARENT, "00-" + "0" * 32 + f"-{PARENT}-01", "nonsense\u00e9"])
async def test_what_the_client_says_of_its_trace_goes_on_to_the_worker_group_if_it_is_well_formed(
    client: httpx2.AsyncClient, service: Any, lines: Any, given: str
) -> None:
    headers = {"traceparent": given.encode(), "x-request-id": b"mine"}
    await client.post("/v1/completions", json=PROMPT, headers=headers)
    (request,) = service.requests
    is_good = given == TRACEPARENT
    assert (request.trace, request.client_request_id) == (TRACEPARENT if is_good else None, "mine")
    assert lines()[0].get("trace_id") == (TRACE if is_good else None)


async def test_two_requests_with_one_id_stay_two(client: httpx2.AsyncClient, service: Any) -> None:
    """Case BUG-013: the id is for logs."""
    for _ in range(2):
        await client.post("/v1/completions", json=PROMPT, headers={"x-request-id": "same"})
    assert {request.client_request_id for request in service.requests} == {"same"}
    assert len({request.request_id for request in service.requests}) == 2


@pytest.fixture
def collector() -> Iterator[SpanCollector]:
    with span_collector() as server:
        yield server


async def spans_of(
    app: Any, collector: SpanCollector, headers: dict[str, str], body: dict[str, Any]
) -> dict[str, Span]:
    """By name, when the application has ended."""
    transport = httpx2.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx2.AsyncClient(transport=transport, base_url="http://o") as http:
        await http.post("/v1/completions", json=body, headers=headers)
        await http.get("/health")
    return {span.name: span for span in collector.spans}


async def test_a_request_is_a_span_with_its_phases_below(
    service: Any, text: TextProcessor, info: ServedModel, collector: SpanCollector
) -> None:
    service.script = phased
    app = build_app(service, one_model(text, info), http=HttpConfig(otlp_traces_endpoint=collector.url))
    spans = await spans_of(app, collector, {"traceparent": TRACEPARENT}, {**PROMPT, "max_tokens": 2})
    assert set(spans) == {"text_completion smollm2", "route", "queue", "prefill", "decode"}
    root = spans["text_completion smollm2"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert service.requests[0].trace == f"00-{TRACE}-{root.span_id.hex()}-01"
    told = attributes(root)
    assert (told["gen_ai.request.model"], told["gen_ai.operation.name"]) == ("smollm2", "text_completion")
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (4, 2)
    assert (told["http.route"], told["http.response.status_code"]) == ("/v1/completions", 200)
    assert told["gen_ai.latency.time_to_first_token"] > 0.0
    phases = [spans[name] for name in ("route", "queue", "prefill", "decode")]
    assert {phase.parent_span_id for phase in phases} == {root.span_id}
    for before, after in itertools.pairwise(phases):
        assert before.start_time_unix_nano <= before.end_time_unix_nano == after.start_time_unix_nano
    assert attributes(spans["prefill"])["octavo.group"] == "group-1"


async def test_a_request_that_moved_has_the_phases_of_each_worker_group(
    service: Any, text: TextProcessor, info: ServedModel, collector: SpanCollector
) -> None:
    app = build_app(service, one_model(text, info), http=HttpConfig(otlp_traces_endpoint=collector.url))
    service.script = lambda _: [
        TokenDelta((500,), num_cached_tokens=3, phases=(0.0, 0.0)),
        TokenDelta((501,)),
        TokenDelta((502,), FinishReason.LENGTH, phases=(0.0, 0.0)),
    ]
    await spans_of(app, collector, {}, {**PROMPT, "max_tokens": 3})
    phases = [span for span in collector.spans if span.parent_span_id]
    names = ["route", "queue", "prefill", "decode", "failover", "queue", "prefill", "decode"]
    assert [phase.name for phase in phases] == names
    for before, after in itertools.pairwise(phases):
        assert before.start_time_unix_nano <= before.end_time_unix_nano == after.start_time_unix_nano
    assert [attributes(each).get("octavo.output_tokens") for each in phases if each.name == "decode"] == [2, 1]


async def test_a_client_that_does_not_want_a_trace_gets_none(
    service: Any, text: TextProcessor, info: ServedModel, collector: SpanCollector
) -> None:
    app = build_app(service, one_model(text, info), http=HttpConfig(otlp_traces_endpoint=collector.url))
    assert await spans_of(app, collector, {"traceparent": TRACEPARENT[:-1] + "0"}, PROMPT) == {}
    assert service.requests[0].trace is not None
    assert service.requests[0].trace.startswith(f"00-{TRACE}-")


async def test_a_failed_request_is_a_failed_span(
    service: Any, text: TextProcessor, info: ServedModel, collector: SpanCollector
) -> None:
    service.script = lambda _: [TokenDelta((), FinishReason.ERROR, error="out of order")]
    app = build_app(service, one_model(text, info), http=HttpConfig(otlp_traces_endpoint=collector.url))
    root = (await spans_of(app, collector, {}, PROMPT))["text_completion smollm2"]
    assert attributes(root)["error.type"] == "500"
    assert root.status.code == 2


async def test_a_collector_that_is_away_holds_up_no_request(
    service: Any, text: TextProcessor, info: ServedModel
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        away = HttpConfig(otlp_traces_endpoint=f"http://127.0.0.1:{free.getsockname()[1]}/v1/traces")
        transport = httpx2.ASGITransport(build_app(service, one_model(text, info), http=away))
        async with httpx2.AsyncClient(transport=transport, base_url="http://o") as http:
            assert (await http.post("/v1/completions", json=PROMPT)).status_code == 200


def test_the_end_of_a_gateway_waits_for_no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry's own end goes on here until the test is over."""
    monkeypatch.setattr(tracing, "_FLUSH_S", 0.01)
    spans, is_over = SpanTracing("http://127.0.0.1:9/v1/traces"), threading.Event()
    monkeypatch.setattr(spans._provider, "shutdown", is_over.wait)
    spans.close()
    assert not is_over.is_set()
    is_over.set()
