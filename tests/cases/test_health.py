"""What may be asked by whom, and when it is true."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from api_calls import COMPLETION
from start_watch import Guarded

from octavo.cluster.api.http.auth import OPEN_PATHS


def test_case_bug_105_ready_is_the_moment_from_which_requests_are_answered(guarded: Guarded) -> None:
    """Asked every 100 ms since before the process was there; the worker group takes longest to come up."""
    ready = [look.ready for look in guarded.looks]
    first = ready.index(200)
    before, after = guarded.looks[:first], guarded.looks[first:]
    assert {look.ready for look in before} <= {None, 503, 404}
    assert before, "nobody was asked before it was ready"
    assert {(look.ready, look.completion, look.health, look.models) for look in after} == {(200, 200, 200, 200)}


# ---- BUG-107: API keys ----


def endpoints(guarded: Guarded) -> Iterator[tuple[str, str]]:
    """Method and path of all that the server says it has."""
    paths = httpx.get(f"{guarded.server.url}/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for method in methods:
            yield method.upper(), path.replace("{model}", guarded.server.model)


def test_case_bug_107_all_that_is_not_open_needs_the_key(guarded: Guarded) -> None:
    found = list(endpoints(guarded))
    assert len(found) > 10
    assert ("POST", "/v1/chat/completions") in found
    for method, path in found:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": guarded.key["authorization"][7:]}):
            answer = httpx.request(method, f"{guarded.server.url}{path}", headers=headers, timeout=30)
            if path in OPEN_PATHS:
                assert answer.status_code == 200, path
            else:
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
        parameters = {"group": "none"} if path == "/debug/profile" else {}  # it would wait for steps
        allowed = httpx.request(
            method, f"{guarded.server.url}{path}", headers=guarded.key, params=parameters, timeout=30
        )
        assert allowed.status_code in (200, 400, 415), path


@pytest.mark.parametrize(
    "path",
    [
        "//v1/completions",
        "/V1/completions",
        "/v1/completions/",
        "/v1//completions",
        "/./v1/completions",
        "/health/../v1/completions",
        "/health/%2e%2e/v1/completions",
        "/health;/../v1/completions",
        "/v1%2fcompletions",
        "/%761/completions",
        "/health?/v1/completions",
        "/v1/completions?/health",
        "/-/../v1/completions",
        "http://127.0.0.1/v1/completions",
    ],
)
def test_case_bug_107_no_other_way_to_write_the_path_goes_round_the_key(guarded: Guarded, path: str) -> None:
    body = json.dumps({"model": guarded.server.model, "prompt": "Hi", "max_tokens": 1})
    status, answer = verbatim(guarded, path, body)
    assert status in (400, 401, 404, 405), answer
    assert b"choices" not in answer


def verbatim(guarded: Guarded, path: str, body: str) -> tuple[int, bytes]:
    """POST without a key to just this path, which no client tidies up."""
    connection = http.client.HTTPConnection(urlsplit(guarded.server.url).netloc, timeout=30)
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_case_bug_107_what_is_behind_the_proxy_is_not_open_either(guarded: Guarded) -> None:
    """Serve's own endpoints are about the proxy, and no way to the model."""
    body: dict[str, Any] = {"model": guarded.server.model, "prompt": "Hi", "max_tokens": 1}
    for prefix in ("/-/healthz", "/-/routes", "/-"):
        answer = httpx.post(f"{guarded.server.url}{prefix}{COMPLETION}", json=body, timeout=30)
        assert answer.status_code in (401, 404, 405), answer.text
