"""What headers say of where a request goes, what the answer's headers say of where it went, and /debug/route."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import orjson
import pytest

from octavo.cluster.api.service import GenerationRequest, Route, RouteWishes
from octavo.worker.errors import Overloaded, Unavailable

COMPLETION = "/v1/completions"
PROMPT = {"model": "smollm2", "prompt": "The quick brown fox"}


async def post(client: httpx2.AsyncClient, fields: dict[str, Any] | None = None, **headers: str) -> httpx2.Response:
    """Header names are given without x-octavo- and with _ for -."""
    named = {f"x-octavo-{name.replace('_', '-')}": value for name, value in headers.items()}
    return await client.post(COMPLETION, json={**PROMPT, **(fields or {})}, headers=named)


# ---- what the headers ask for ----


async def test_groups_are_pinned_excluded_and_preferred(client: httpx2.AsyncClient, service: Any) -> None:
    headers = {"group": "a, b,a", "exclude_groups": "c", "prefer_groups": "b"}
    assert (await post(client, **headers, session_id="s")).status_code == 200
    assert service.requests[0].wishes == RouteWishes("s", ("a", "b"), ("c",), ("b",))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_without_headers_nothing_is_wished_for(client: httpx2.AsyncClient, service: Any, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    await client.post(path, json={"model": "smollm2", **prompt})
    request: GenerationRequest = service.requests[0]
    assert (request.wishes, request.tenant, request.priority) == (RouteWishes(), None, 0)


REFUSED: dict[str, dict[str, str]] = {
    "The header x-octavo-group names 17 worker groups, at most 16 are allowed.": {
        "group": ",".join(f"g{number}" for number in range(17))
    },
    "The header x-octavo-exclude-groups has a name of 129 characters, at most 128 are allowed.": {
        "exclude_groups": f"a,{'b' * 129}"
    },
    "The header x-octavo-prefer-groups has a name too few beside a comma.": {"prefer_groups": "a,,b"},
    "The header x-octavo-group is empty; leave it out instead.": {"group": " "},
    "The header x-octavo-session-id is empty; leave it out instead.": {"session_id": ""},
    "The header x-octavo-tenant has 1025 characters, at most 1024 are allowed.": {"tenant": "t" * 1025},
    "The header x-octavo-priority must be a whole number of 64 bits, got 'high'.": {"priority": "high"},
    "The header x-octavo-priority must be a whole number of 64 bits, got '9223372036854775808'.": {
        "priority": str(2**63)
    },
    "The headers x-octavo-group and x-octavo-exclude-groups leave no worker group to serve it.": {
        "group": "a",
        "exclude_groups": "b,a",
    },
    "Unknown header x-octavo-groups; there are x-octavo-group, x-octavo-exclude-groups, x-octavo-prefer-groups,"
    " x-octavo-session-id, x-octavo-tenant, x-octavo-priority.": {"groups": "a"},
}


@pytest.mark.parametrize("message", REFUSED)
async def test_a_wrong_header_is_named_with_limit_and_value(
    client: httpx2.AsyncClient, service: Any, message: str
) -> None:
    headers = REFUSED[message]
    answer = await post(client, **headers)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
    assert answer.json()["error"]["param"] == f"x-octavo-{next(iter(headers)).replace('_', '-')}"
    assert service.requests == []


async def test_a_header_that_is_given_twice_is_refused(client: httpx2.AsyncClient) -> None:
    headers = [("x-octavo-session-id", "a"), ("x-octavo-session-id", "b")]
    answer = await client.post(COMPLETION, json=PROMPT, headers=headers)
    assert answer.json()["error"]["message"] == "The header x-octavo-session-id is given 2 times."


SESSIONS = ["header", "body", "key", "user"]


@pytest.mark.parametrize("first", range(4))
async def test_the_most_particular_name_is_the_session(client: httpx2.AsyncClient, service: Any, first: int) -> None:
    names = {"session_id": "body", "prompt_cache_key": "key", "user": "user"}
    fields = {name: value for name, value in names.items() if value in SESSIONS[first:]}
    headers = {"session_id": "header"} if first == 0 else {}
    await post(client, fields, **headers)
    assert service.requests[0].wishes.session_id == SESSIONS[first]


async def test_the_tenants_header_goes_before_the_body_and_the_key(client: httpx2.AsyncClient, service: Any) -> None:
    headers = {"x-octavo-tenant": "t", "authorization": "Bearer sk-secret"}
    await client.post(COMPLETION, json={**PROMPT, "user": "u"}, headers=headers)
    assert (service.requests[0].tenant, service.requests[0].wishes.session_id) == ("t", "u")


@pytest.mark.parametrize(("fields", "expected"), [({}, -7), ({"priority": 3}, 3), ({"priority": 0}, 0)])
async def test_the_priority_header_is_for_bodies_without_one(
    client: httpx2.AsyncClient, service: Any, fields: dict[str, Any], expected: int
) -> None:
    await post(client, fields, priority="-7")
    assert service.requests[0].priority == expected


# ---- what the answer says ----


async def test_estimates_and_waits_are_told_in_ms(
    client: httpx2.AsyncClient, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = [Route("a", 16, "prefix", 0.25, 1.5), Route("b", 0, "load", 0.75, 0.0)]
    start = service.start

    async def start_routed(request: GenerationRequest) -> Any:
        generation = await start(request)
        generation.route = routes[len(service.requests) - 1]
        return generation

    monkeypatch.setattr(service, "start", start_routed)
    headers = (await client.post(COMPLETION, json={**PROMPT, "prompt": ["one", "two"]})).headers
    ours = {name: value for name, value in headers.items() if name.startswith("x-octavo")}
    assert ours == {
        "x-octavo-group": "a,b",
        "x-octavo-cached-tokens": "16",
        "x-octavo-route-reason": "prefix,load",
        "x-octavo-expected-ttft-ms": "750",
        "x-octavo-queue-ms": "1500",
    }
    metrics = (await client.get("/metrics")).text
    assert 'ttft_actual_to_expected_ratio_count{gateway="alone",model_name="smollm2"} 2.0' in metrics


async def test_nothing_is_said_of_estimates_that_nobody_made(client: httpx2.AsyncClient) -> None:
    answer = await post(client)
    assert not {"x-octavo-expected-ttft-ms", "x-octavo-queue-ms"} & set(answer.headers)
    metrics = (await client.get("/metrics")).text
    assert 'ttft_actual_to_expected_ratio_count{gateway="alone",model_name="smollm2"} 0.0' in metrics


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("kind", "status"), [(Overloaded, 429), (Unavailable, 503)])
async def test_a_refusal_names_the_routers_reason(
    client: httpx2.AsyncClient, service: Any, kind: Any, status: int, stream: bool
) -> None:
    service.start_error = kind("1,024 requests wait", retry_after_s=2.5, reason="queue_full")
    answer = await post(client, {"stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "3")
    assert answer.headers["x-octavo-route-reason"] == "queue_full"
    assert answer.json()["error"]["message"] == "1,024 requests wait"


async def test_case_bug_033_a_stream_that_waits_in_the_router_begins_all_the_same(
    address: str, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its head and comments come meanwhile; what the router says in the end is then an event."""
    turn = asyncio.Event()
    start = service.start

    async def start_late(request: GenerationRequest) -> Any:
        await turn.wait()
        return await start(request)

    monkeypatch.setattr(service, "start", start_late)
    for error in (None, Overloaded("it waited for too long", retry_after_s=1.0, reason="queue_timeout")):
        turn.clear()
        service.start_error = error
        async with (
            httpx2.AsyncClient() as client,
            client.stream("POST", f"{address}{COMPLETION}", json={**PROMPT, "stream": True}) as answer,
        ):
            lines = answer.aiter_lines()
            assert (answer.status_code, answer.headers["x-octavo-route-reason"]) == (200, "queued")
            assert await anext(lines) == ": keep-alive"
            turn.set()
            events = [line.removeprefix("data: ") async for line in lines if line.startswith("data: ")]
        if error is None:
            assert events[-1] == "[DONE]"
        else:
            assert [orjson.loads(event)["error"]["code"] for event in events] == ["rate_limit_exceeded"]


async def test_a_client_that_leaves_a_waiting_stream_ends_the_wait(
    address: str, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()

    async def wait_for_ever(request: GenerationRequest) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(service, "start", wait_for_ever)
    async with (
        httpx2.AsyncClient() as client,
        client.stream("POST", f"{address}{COMPLETION}", json={**PROMPT, "stream": True}),
    ):
        assert not ended.is_set()
    await asyncio.wait_for(ended.wait(), 5)


async def test_prompts_wait_together_and_one_refusal_ends_all(
    client: httpx2.AsyncClient, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, num_waiting, all_wait = service.start, 0, asyncio.Event()

    async def start_third_badly(request: GenerationRequest) -> Any:
        nonlocal num_waiting
        num_waiting += 1
        if num_waiting == 3:
            all_wait.set()
            raise Overloaded("full", retry_after_s=1.0)
        if num_waiting == 2:
            await asyncio.Event().wait()
        return await start(request)

    monkeypatch.setattr(service, "start", start_third_badly)
    answer = await client.post(COMPLETION, json={**PROMPT, "prompt": ["one", "two", "three"]})
    assert (answer.status_code, all_wait.is_set()) == (429, True)
    assert service.generations[0].aborted.is_set()


# ---- /debug/route ----


@pytest.fixture
def decisions(service: Any) -> list[dict[str, Any]]:
    """Of 300 requests, two prompts each, newest first."""
    service.decisions = [
        {"request_id": f"cmpl-{number:03}-{prompt}", "group": "a"} for number in range(300, 0, -1) for prompt in (1, 0)
    ]
    return list(service.decisions)


@pytest.mark.parametrize(("query", "expected"), [("", 20), ("?limit=1", 1), ("?limit=256", 256)])
async def test_the_last_decisions_newest_first(
    client: httpx2.AsyncClient, decisions: list[dict[str, Any]], query: str, expected: int
) -> None:
    answer = await client.get(f"/debug/route{query}")
    assert answer.json() == {"decisions": decisions[:expected]}


async def test_a_completions_id_finds_all_of_its_prompts(client: httpx2.AsyncClient, decisions: list[Any]) -> None:
    for query, expected in (("", ["cmpl-299-1", "cmpl-299-0"]), ("&limit=1", ["cmpl-299-1"])):
        answer = await client.get(f"/debug/route?request_id=cmpl-299{query}")
        assert [decision["request_id"] for decision in answer.json()["decisions"]] == expected
    assert (await client.get("/debug/route?request_id=chatcmpl-1")).json() == {"decisions": []}


@pytest.mark.parametrize(
    ("query", "param"),
    [
        *[(f"limit={value}", "limit") for value in ("0", "257", "-1", "1.5", "", "ten", "1" * 5000, "٣")],
        ("request_id=", "request_id"),
        (f"request_id={'r' * 129}", "request_id"),
        ("limits=3", "limits"),
    ],
)
async def test_a_wrong_parameter_is_named(client: httpx2.AsyncClient, query: str, param: str) -> None:
    answer = await client.get(f"/debug/route?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_without_a_router_there_is_nothing_to_explain(client: httpx2.AsyncClient, service: Any) -> None:
    service.decisions = Unavailable("the router does not answer at present")
    assert (await client.get("/debug/route")).status_code == 503
