"""What the operator limits, how long a request waits, who it counts for, and the caches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import orjson
import pytest
from one_model import one_model

from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.service import ServedModel, TokenDelta
from octavo.cluster.api.text.processor import TextProcessor
from octavo.worker.errors import Unavailable
from octavo.worker.messages import FinishReason

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
PROMPT = {"model": "smollm2", "prompt": "The quick brown fox"}
MESSAGES = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}]}

Limited = Callable[..., AbstractAsyncContextManager[httpx2.AsyncClient]]


@pytest.fixture
def limited(service: Any, text: TextProcessor, info: ServedModel) -> Limited:
    """A client of a server that was started with other limits."""

    @asynccontextmanager
    async def start(**limits: Any) -> AsyncIterator[httpx2.AsyncClient]:
        transport = httpx2.ASGITransport(build_app(service, one_model(text, replace(info, **limits))))
        async with httpx2.AsyncClient(transport=transport, base_url="http://octavo") as client:
            yield client

    return start


# ---- max_output_tokens ----


@pytest.mark.parametrize(
    ("path", "field"), [(COMPLETION, "max_tokens"), (CHAT, "max_tokens"), (CHAT, "max_completion_tokens")]
)
async def test_more_output_than_the_operator_allows_is_refused(limited: Limited, path: str, field: str) -> None:
    body = PROMPT if path == COMPLETION else MESSAGES
    async with limited(max_output_tokens=20) as client:
        answer = await client.post(path, json={**body, field: 21})
        assert (await client.post(path, json={**body, field: 20})).status_code == 200
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert "21" in error["message"]
    assert "20" in error["message"]


@pytest.mark.parametrize(("cap", "num_prompt_tokens", "expected"), [(20, 4, 20), (None, 4, 252), (20, 250, 6)])
async def test_without_max_tokens_the_smaller_limit_counts(
    limited: Limited, service: Any, cap: int | None, num_prompt_tokens: int, expected: int
) -> None:
    async with limited(max_output_tokens=cap) as client:
        await client.post(COMPLETION, json={**PROMPT, "prompt": [500] * num_prompt_tokens})
    assert service.requests[0].sampling.max_tokens == expected


async def test_min_tokens_above_the_operators_limit(limited: Limited) -> None:
    async with limited(max_output_tokens=20) as client:
        answer = await client.post(COMPLETION, json={**PROMPT, "min_tokens": 21})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")


# ---- priority ----


async def test_priority_is_refused_where_it_would_be_ignored(limited: Limited, service: Any) -> None:
    async with limited(scheduling_policy="fcfs") as client:
        answer = await client.post(COMPLETION, json={**PROMPT, "priority": -1})
        assert (await client.post(COMPLETION, json={**PROMPT, "priority": 0})).status_code == 200
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "priority")
    assert error["message"].startswith("priority is -1, but the server schedules first come, first served")
    assert "--scheduling-policy priority" in error["message"]
    assert len(service.requests) == 1


@pytest.mark.parametrize("policy", ["priority", "shortest", "fair"])
@pytest.mark.parametrize("priority", [-(2**63), 2**63 - 1])
async def test_any_priority_elsewhere(limited: Limited, service: Any, policy: str, priority: int) -> None:
    async with limited(scheduling_policy=policy) as client:
        await client.post(COMPLETION, json={**PROMPT, "priority": priority})
    assert service.requests[0].priority == priority


# ---- waiting ----


@pytest.mark.parametrize("value", [0, -1, "1"])
async def test_a_queue_timeout_is_a_positive_number(client: httpx2.AsyncClient, value: Any) -> None:
    answer = await client.post(COMPLETION, json={**PROMPT, "queue_timeout": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "queue_timeout")


async def test_a_request_that_waited_too_long_is_told_when_to_come_again(
    client: httpx2.AsyncClient, service: Any
) -> None:
    service.script = lambda _: [
        TokenDelta((), FinishReason.OVERLOADED, error="it waited for 2 s", branch=1, retry_after_s=3.2)
    ]
    body = {**PROMPT, "queue_timeout": 2.0, "n": 2}
    answer = await client.post(COMPLETION, json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "4")
    assert answer.json()["error"] == {
        "message": "it waited for 2 s",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert service.requests[0].queue_timeout_s == 2.0
    assert service.generations[0].num_aborts == 1
    ends = [line for line in (await client.get("/metrics")).text.splitlines() if "request_success_total{" in line]
    assert len(ends) == 1
    assert 'finished_reason="overloaded"' in ends[0]


async def test_in_a_stream_it_is_an_error_event(client: httpx2.AsyncClient, service: Any) -> None:
    """The head of a stream is sent before the queue, so that comments can keep the connection."""
    service.script = lambda _: [TokenDelta((), FinishReason.OVERLOADED, error="full", retry_after_s=3.0)]
    answer = await client.post(COMPLETION, json={**PROMPT, "stream": True})
    assert answer.status_code == 200
    (event,) = [line for line in answer.text.split("\n\n") if line]
    assert orjson.loads(event.removeprefix("data: "))["error"]["code"] == "rate_limit_exceeded"


# ---- the caches ----


@pytest.mark.parametrize(("value", "uses"), [(None, True), (True, True), (False, False)])
async def test_cache_prompt(client: httpx2.AsyncClient, service: Any, value: bool | None, uses: bool) -> None:
    await client.post(COMPLETION, json={**PROMPT, "cache_prompt": value})
    assert service.requests[0].use_prefix_cache is uses


async def test_resetting_the_caches(client: httpx2.AsyncClient, service: Any) -> None:
    answer = await client.post("/reset_prefix_cache")
    assert answer.json() == {"blocks_forgotten": {"group-1": 7, "group-2": None}}
    service.forgotten = Unavailable("no worker group could be reached")
    answer = await client.post("/reset_prefix_cache")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
    assert (await client.get("/reset_prefix_cache")).status_code == 405


# ---- tenants ----


async def tenant_of(client: httpx2.AsyncClient, service: Any, fields: dict[str, Any], header: str | None) -> str | None:
    headers = {} if header is None else {"authorization": header}
    await client.post(COMPLETION, json={**PROMPT, **fields}, headers=headers)
    tenant: str | None = service.requests[-1].tenant
    return tenant


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"user": "u"}, "u"), ({"safety_identifier": "s"}, "s"), ({"user": "u", "safety_identifier": "s"}, "u")],
)
async def test_a_named_user_is_the_tenant(
    client: httpx2.AsyncClient, service: Any, fields: dict[str, Any], expected: str
) -> None:
    assert await tenant_of(client, service, fields, "Bearer sk-secret") == expected


async def test_otherwise_the_api_key_is_and_is_not_told(client: httpx2.AsyncClient, service: Any) -> None:
    keys = ("Bearer sk-secret", "bearer  sk-secret ", "Bearer sk-other")
    first, again, other = [await tenant_of(client, service, {"user": ""}, key) for key in keys]
    assert first == again != other
    assert first is not None
    assert "secret" not in first
    assert len(first) < 30


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic dTpw", "sk-secret"])
async def test_without_a_key_there_is_no_tenant(client: httpx2.AsyncClient, service: Any, header: str | None) -> None:
    assert await tenant_of(client, service, {}, header) is None
