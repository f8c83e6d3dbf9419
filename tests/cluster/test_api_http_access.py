"""Who may use the API, and from where: API keys, CORS, limits of headers and of concurrency."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest
from one_model import one_model

from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.http.auth import LOOK_S, ApiKeys, read_keys
from octavo.cluster.api.service import ServedModel, TokenDelta
from octavo.cluster.api.text.processor import TextProcessor
from octavo.cluster.http_config import HttpConfig, key_digest
from octavo.worker.errors import ConfigurationError
from octavo.worker.messages import FinishReason

COMPLETION = "/v1/completions"
BODY = {"model": "smollm2", "prompt": "The quick brown fox"}
PAGE = "https://chat.example"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}

Served = Callable[..., AbstractAsyncContextManager[httpx2.AsyncClient]]


@pytest.fixture
def served_with(service: Any, text: TextProcessor, info: ServedModel) -> Served:
    """A client of a server with other settings of HTTP."""

    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
        app = build_app(service, one_model(text, info), http=HttpConfig.model_validate(settings))
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://octavo") as client:
            yield client

    return start


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---- keys ----


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), bearer(""), {"authorization": "Basic Z29vZDpnb29k"}])
async def test_without_a_good_key_nothing_is_answered(
    served_with: Served, service: Any, headers: dict[str, str]
) -> None:
    async with served_with(api_key=["good"]) as client:
        answer = await client.post(COMPLETION, content=b"no JSON at all", headers=headers)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("invalid_api_key", "invalid_request_error", None)
    assert "wrong" not in error["message"]


@pytest.mark.parametrize("key", ["good", "better"])
async def test_every_key_is_good(served_with: Served, key: str) -> None:
    async with served_with(api_key=["good", key_digest("better")]) as client:
        assert (await client.post(COMPLETION, json=BODY, headers=bearer(key))).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/models", "/tokenize", "/detokenize", "/debug/route", "/reset_prefix_cache", "/x"]
)
async def test_what_needs_a_key(served_with: Served, path: str) -> None:
    async with served_with(api_key=["good"]) as client:
        assert {(await client.get(path)).status_code, (await client.post(path)).status_code} == {401}


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json"])
async def test_what_needs_none(served_with: Served, path: str) -> None:
    async with served_with(api_key=["good"]) as client:
        assert (await client.get(path)).status_code == 200


def test_keys_are_kept_as_digests_only() -> None:
    config = HttpConfig.model_validate({"api_key": ["secret-1", "secret-2", "secret-1"]})
    assert "secret" not in f"{config} {config.model_dump()}"
    assert config.api_key == (key_digest("secret-1"), key_digest("secret-2"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("one # of alice\n\n# nobody\nse#cret\n")
    keys = ApiKeys([], file, clock=clock)
    assert [keys.accept(key) for key in ("one", "se#cret", "se")] == [True, True, False]
    file.write_text(f"two\n{key_digest('three')}\n")
    assert not keys.accept("two"), "it is looked at once a second at the most"
    clock.now += LOOK_S
    assert [keys.accept(key) for key in ("one", "two", "three", "# nobody")] == [False, True, True, False]


def test_a_file_that_cannot_be_read_leaves_the_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("one\n")
    keys = ApiKeys([key_digest("own")], file, clock=clock)
    for change in (file.unlink, lambda: file.write_text("se cret\n")):
        change()
        clock.now += LOOK_S
        with caplog.at_level(logging.ERROR):
            assert keys.accept("one")
        clock.now += LOOK_S
        assert keys.accept("own")
    assert len(caplog.records) == 2, "each change is logged once"
    assert "secret" not in caplog.text.replace(" ", "")
    file.write_text("")
    clock.now += LOOK_S
    assert [keys.accept(key) for key in ("one", "own", "")] == [False, True, False], "an empty one takes its keys back"


def test_a_file_that_could_not_be_read_once_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("one\n")
    keys = ApiKeys([], file, clock=clock)
    file.write_text("another\n")
    clock.now += LOOK_S
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", Mock(side_effect=OSError("not now")))
        assert keys.accept("one")
    clock.now += LOOK_S
    assert [keys.accept(key) for key in ("one", "another")] == [False, True]


def test_the_digest_of_a_key_is_no_key() -> None:
    assert not ApiKeys([key_digest("good")]).accept(key_digest("good"))


@pytest.mark.parametrize("content", [None, "", "# none\n", "se cret\n"])
def test_a_file_without_keys_is_refused_at_the_start(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "keys").write_text(content)
    with pytest.raises(ConfigurationError, match=r"--api-key-file: .*keys") as refusal:
        ApiKeys([], tmp_path / "keys")
    assert "cret" not in str(refusal.value)


def test_a_line_that_is_no_key_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("good\nb\u00e4d\n")
    with pytest.raises(ValueError, match="line 2"):
        read_keys(tmp_path / "keys")


# ---- pages in browsers ----


async def test_pages_may_use_nothing_by_default(client: httpx2.AsyncClient) -> None:
    answer = await client.options(COMPLETION, headers=PREFLIGHT)
    assert answer.status_code == 405
    answer = await client.post(COMPLETION, json=BODY, headers={"origin": PAGE})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origins", ["*", [PAGE], '["https://x.example", "https://chat.example"]'])
async def test_a_page_that_is_allowed_needs_no_key_to_ask(served_with: Served, origins: Any) -> None:
    async with served_with(allowed_origins=origins, api_key=["good"]) as client:
        preflight = await client.options(COMPLETION, headers=PREFLIGHT)
        refused = await client.post(COMPLETION, json=BODY, headers={"origin": PAGE})
        answer = await client.post(COMPLETION, json=BODY, headers={"origin": PAGE, **bearer("good")})
    assert [answer.status_code for answer in (preflight, refused, answer)] == [200, 401, 200]
    for each in (preflight, refused, answer):
        assert each.headers["access-control-allow-origin"] in ("*", PAGE)
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    shown = answer.headers["access-control-expose-headers"].split(", ")
    assert {name for name in answer.headers if name.startswith("x-")} <= set(shown)
    assert "retry-after" in shown


async def test_another_page_is_not_allowed(served_with: Served) -> None:
    async with served_with(allowed_origins=["https://x.example"], allowed_methods=["GET"]) as client:
        assert (await client.options(COMPLETION, headers=PREFLIGHT)).status_code == 400
        answer = await client.post(COMPLETION, json=BODY, headers={"origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers


# ---- limits ----


async def test_headers_have_a_limit(client: httpx2.AsyncClient) -> None:
    answer = await client.get("/health", headers={"x-long": "x" * 40_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")


async def test_more_requests_than_allowed_are_refused_at_once(served_with: Served, service: Any) -> None:
    gate, begun = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        begun.set()
        await gate.wait()

    service.script = lambda _: [wait, TokenDelta((500,), FinishReason.LENGTH)]
    async with served_with(max_concurrent_requests=1) as client:
        first = asyncio.create_task(client.post(COMPLETION, json=BODY))
        await begun.wait()
        second = await client.post(COMPLETION, json=BODY)
        assert (await client.get("/health")).status_code == 200
        gate.set()
        assert (await first).status_code == 200
        assert (await client.post(COMPLETION, json=BODY)).status_code == 200
    assert (second.status_code, second.headers["retry-after"]) == (429, "1")
    assert second.json()["error"]["code"] == "rate_limit_exceeded"


async def test_a_request_that_fails_counts_no_longer(served_with: Served) -> None:
    async with served_with(max_concurrent_requests=1) as client:
        for _ in range(3):
            assert (await client.post(COMPLETION, json={})).status_code == 400
        asking = asyncio.create_task(client.post(COMPLETION, json=BODY))
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        assert (await client.post(COMPLETION, json=BODY)).status_code == 200


# ---- HEAD ----


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/smollm2"])
async def test_head_is_get_without_a_body(address: str, path: str) -> None:
    async with httpx2.AsyncClient() as http:
        head, get = await http.head(f"{address}{path}"), await http.get(f"{address}{path}")
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_the_environment_names_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OCTAVO_API_KEY", "from-outside")
    assert HttpConfig().api_key == (key_digest("from-outside"),)
    assert HttpConfig.model_validate({"api_key": "flag"}).api_key == (key_digest("flag"),)
