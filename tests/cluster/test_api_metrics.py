"""Metrics of the gateway, and the merging of several processes' texts into one valid exposition."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from octavo.cluster.api.answer.run import Run
from octavo.cluster.api.metrics import GatewayMetrics, merge_metrics
from octavo.cluster.api.request.answer_options import AnswerOptions
from octavo.cluster.api.request.judged import JudgedRequest
from octavo.cluster.api.service import GenerationRequest, TokenDelta
from octavo.cluster.api.text.processor import TextProcessor
from octavo.worker.errors import Overloaded
from octavo.worker.messages import FinishReason, SamplingParams

PROMPT = {"model": "smollm2", "prompt": "The quick brown fox"}


def samples(text: str) -> dict[tuple[Any, ...], float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def value(client: httpx2.AsyncClient, name: str, **labels: str) -> float:
    found = samples((await client.get("/metrics")).text)
    return found[(name, *sorted({"model_name": "smollm2", "gateway": "alone", **labels}.items()))]


async def test_what_a_request_leaves_behind(client: httpx2.AsyncClient) -> None:
    for stream in (True, False):
        await client.post("/v1/completions", json={**PROMPT, "stream": stream})
    assert await value(client, "octavo_prompt_tokens_total") == 8
    assert await value(client, "octavo_generation_tokens_total") == 10  # the prompt and an end-of-sequence token
    assert await value(client, "octavo_prompt_cached_tokens_total") == 32
    assert await value(client, "octavo_time_to_first_token_seconds_count") == 2
    assert await value(client, "octavo_inter_token_latency_seconds_count") == 8
    assert await value(client, "octavo_e2e_request_latency_seconds_count") == 2
    assert await value(client, "octavo_request_success_total", finished_reason="stop") == 2
    assert await value(client, "octavo_http_requests_total", path="/v1/completions", status="200") == 2
    assert await value(client, "octavo_gateway_requests_in_flight") == 0


async def test_case_bug_108_a_client_that_leaves_with_the_last_event_was_answered(
    service: Any, text: TextProcessor
) -> None:
    service.script = lambda _: [TokenDelta((500,)), TokenDelta((501,), FinishReason.LENGTH)]
    metrics = GatewayMetrics("smollm2", "alone")
    request = GenerationRequest("r", "smollm2", (5, 6, 7), SamplingParams(max_tokens=2, seed=0))
    judged = JudgedRequest("cmpl-1", "smollm2", (request,), AnswerOptions())
    run = await Run.start(judged, service, text, metrics, time.perf_counter())
    with run:
        while all(event.finish_reason is None for event in await run.next()):
            pass
    found = samples(metrics.text())
    ends = {key[1][1]: n for key, n in found.items() if key[0] == "octavo_request_success_total" and n}
    assert ends == {"length": 1}


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.LENGTH])
async def test_every_end_is_counted_once(client: httpx2.AsyncClient, service: Any, reason: FinishReason) -> None:
    service.script = lambda _: [TokenDelta((), reason)]
    await client.post("/v1/completions", json=PROMPT)
    found = samples((await client.get("/metrics")).text)
    ends = {key: number for key, number in found.items() if key[0] == "octavo_request_success_total"}
    labels = (("finished_reason", reason.value), ("gateway", "alone"), ("model_name", "smollm2"))
    assert ends == {("octavo_request_success_total", *labels): 1}
    assert await value(client, "octavo_gateway_requests_in_flight") == 0


async def test_case_bug_108_a_known_mix_is_counted_exactly(address: str, service: Any) -> None:
    """Ten that end by themselves, five by their limit, seven left while they stream, three while they wait, four bad
    ones, two with three choices; tokens as the answers' own usage tells."""
    usages: list[dict[str, int]] = []
    async with httpx2.AsyncClient(base_url=address, timeout=20) as http:

        async def ask(**fields: Any) -> int:
            answer = await http.post("/v1/completions", json=PROMPT | fields)
            if answer.status_code == 200:
                usages.append(answer.json()["usage"])
            return int(answer.status_code)

        ok: list[dict[str, Any]] = [{} for _ in range(10)] + [{"max_tokens": 2}] * 5 + [{"n": 3}] * 2
        assert {await ask(**fields) for fields in ok} == {200}
        assert [await ask(max_tokens=-1) for _ in range(4)] == [400] * 4
        echo = service.script
        service.script = lambda _: [TokenDelta((500, 501), num_cached_tokens=0)]
        for _ in range(7):
            async with http.stream("POST", "/v1/completions", json=PROMPT | {"stream": True}) as answer:
                await anext(answer.aiter_lines())
        service.script, waits = echo, service.start

        async def wait_for_a_turn(_: object) -> None:
            await asyncio.Event().wait()

        service.start = wait_for_a_turn
        for _ in range(3):
            async with http.stream("POST", "/v1/completions", json=PROMPT | {"stream": True}) as answer:
                await anext(answer.aiter_lines())  # a comment: it waits in the router
        service.start = waits
        found = await settled(http)
    ends = {dict(key[1:])["finished_reason"]: n for key, n in found.items() if key[0] == "octavo_request_success_total"}
    assert ends == {"stop": 12, "length": 5, "abort": 10}
    own = {key[0]: number for key, number in found.items() if len(key) == 3}
    assert own["octavo_prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages) + 7 * 4
    assert own["octavo_generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages) + 7 * 2
    assert own["octavo_time_to_first_token_seconds_count"] == 17 + 7
    assert own["octavo_gateway_requests_in_flight"] == 0


async def settled(http: httpx2.AsyncClient) -> dict[tuple[Any, ...], float]:
    """The metrics when no request is in flight any more."""
    while True:
        found = samples((await http.get("/metrics")).text)
        if not any(number for key, number in found.items() if key[0] == "octavo_gateway_requests_in_flight"):
            return found


async def test_case_bug_108_errors_in_metrics_never_touch_an_answer(
    client: httpx2.AsyncClient, service: Any, caplog: pytest.LogCaptureFixture
) -> None:
    service.script = lambda _: [TokenDelta((500,), num_cached_tokens=-1), TokenDelta((501,), FinishReason.LENGTH)]
    answer = await client.post("/v1/completions", json=PROMPT)
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert "a metric could not be written" in caplog.text
    assert await value(client, "octavo_request_success_total", finished_reason="length") == 1


async def test_a_refusal_of_the_cluster_is_an_end(client: httpx2.AsyncClient, service: Any) -> None:
    service.start_error = Overloaded("full", retry_after_s=1.0)
    assert (await client.post("/v1/completions", json=PROMPT)).status_code == 429
    assert await value(client, "octavo_request_success_total", finished_reason="overloaded") == 1
    assert await value(client, "octavo_gateway_requests_in_flight") == 0


async def test_paths_are_routes(client: httpx2.AsyncClient) -> None:
    for path in ("/v1/nope", "/v1/other", "/v1/models/a", "/v1/models/b"):
        await client.get(path)
    assert await value(client, "octavo_http_requests_total", path="other", status="404") == 2
    assert await value(client, "octavo_http_requests_total", path="/v1/models/{model:path}", status="404") == 2


async def test_the_answer_covers_the_cluster(client: httpx2.AsyncClient, service: Any) -> None:
    service.cluster_metrics = "# TYPE octavo_num_requests_running gauge\noctavo_num_requests_running 3\n"
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert samples(answer.text)[("octavo_num_requests_running",)] == 3


def exposition(group: str, counts: list[int]) -> str:
    registry = CollectorRegistry()
    counter = Counter("octavo_steps", "Steps.", ["kind"], registry=registry)
    gauge = Gauge("octavo_running", 'Running,\nin "group" \\ here.', ["group"], registry=registry)
    histogram = Histogram("octavo_step_seconds", "Step time.", buckets=[1, 2], registry=registry)
    for count in counts:
        counter.labels("decode").inc(count)
        gauge.labels(group).set(count)
        histogram.observe(count)
    return generate_latest(registry).decode()


@given(st.lists(st.lists(st.integers(0, 5), max_size=5), max_size=4))
def test_merged_texts_are_one_valid_exposition(groups: list[list[int]]) -> None:
    merged = merge_metrics(exposition(f'g"{index}', counts) for index, counts in enumerate(groups))
    types = [line for line in merged.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) == (3 if groups else 0)
    series = [line.rsplit(" ", 1)[0] for line in merged.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))
    found = samples(merged)
    total = sum(map(sum, groups))
    assert found.get(("octavo_steps_total", ("kind", "decode")), 0) == total
    assert found.get(("octavo_step_seconds_sum",), 0) == total
    for index, counts in enumerate(groups):
        assert found.get(("octavo_running", ("group", f'g"{index}')), 0) == (counts[-1] if counts else 0)


def test_merging_again_changes_nothing() -> None:
    once = merge_metrics([exposition("a", [1]), exposition("b", [2])])
    assert merge_metrics([once]) == once
    assert "_created" not in once


def test_samples_without_a_type_are_families_of_their_own() -> None:
    text = "# TYPE octavo_num gauge\noctavo_num 1\noctavo_num_running 2\n"
    assert merge_metrics([text, text]).splitlines() == [
        "# TYPE octavo_num gauge",
        "octavo_num 2.0",
        "octavo_num_running 4.0",
    ]
