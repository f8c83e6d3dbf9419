"""What a body may be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import orjson
import pytest
from one_model import one_model
from pydantic import ByteSize

from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.service import ServedModel
from octavo.cluster.api.text.processor import TextProcessor
from octavo.cluster.http_config import HttpConfig

COMPLETION = "/v1/completions"
BODY = {"model": "smollm2", "prompt": "The quick brown fox"}


# ---- what is no JSON, or not said to be ----

NO_JSON = {
    "empty": b"",
    "cut off": b'{"model": "smollm2"',
    "something after it": b'{"model": "smollm2", "prompt": "a"} x',
    "NaN": b'{"model": "smollm2", "prompt": "a", "temperature": NaN}',
    "Infinity": b'{"model": "smollm2", "prompt": "a", "temperature": Infinity}',
    "a number beyond float64": b'{"model": "smollm2", "prompt": "a", "temperature": 1e400}',
    "deep": b'{"model": "smollm2", "prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    "half a surrogate": b'{"model": "smollm2", "prompt": "\\ud800"}',
    "not UTF-8": b'{"model": "smollm2", "prompt": "\xff"}',
    "UTF-16": '{"model": "smollm2"}'.encode("utf-16"),
}


@pytest.mark.parametrize("body", NO_JSON.values(), ids=NO_JSON)
async def test_what_is_no_json_is_refused(client: httpx2.AsyncClient, body: bytes) -> None:
    answer = await client.post(COMPLETION, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("value", [b"123456789012345678901234567890", b"1e30", b"-1e30"])
async def test_a_huge_number_is_refused_by_name(client: httpx2.AsyncClient, value: bytes) -> None:
    body = b'{"model": "smollm2", "prompt": "a", "max_tokens": ' + value + b"}"
    answer = await client.post(COMPLETION, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


async def test_of_a_name_that_is_there_twice_the_last_value_counts(client: httpx2.AsyncClient, service: Any) -> None:
    body = b'{"model": "smollm2", "prompt": "a", "max_tokens": 1, "max_tokens": 2}'
    await client.post(COMPLETION, content=body, headers={"content-type": "application/json"})
    assert service.requests[0].sampling.max_tokens == 2


@pytest.mark.parametrize("header", [{"content-type": "text/plain"}, {"content-encoding": "gzip"}])
async def test_other_types_and_compressed_bodies(client: httpx2.AsyncClient, header: dict[str, str]) -> None:
    headers = {"content-type": "application/json", **header}
    answer = await client.post(COMPLETION, content=orjson.dumps(BODY), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


# ---- the size ----


async def test_a_body_is_measured_while_it_is_read(service: Any, text: TextProcessor, info: ServedModel) -> None:
    """In chunks nobody announces its length."""
    num_read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal num_read
        for _ in range(1_000):
            num_read += 1
            yield b" " * 1_000

    app = build_app(service, one_model(text, info), http=HttpConfig(max_body_bytes=ByteSize(10_000)))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://octavo") as http:
        announced = await http.post(COMPLETION, json={**BODY, "prompt": "x" * 10_000})
        answer = await http.post(COMPLETION, content=chunks(), headers={"content-type": "application/json"})
    assert num_read < 20
    assert announced.status_code == answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert "10000 bytes" in answer.json()["error"]["message"]
