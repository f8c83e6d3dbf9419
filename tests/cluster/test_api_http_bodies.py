"""What a body may be, and that large ones are judged in a process of their own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from pydantic import ByteSize
from starlette.exceptions import HTTPException

from octavo.cluster.api import judging
from octavo.cluster.api.app import build_app
from octavo.cluster.api.bodies import LARGE_BYTES
from octavo.cluster.api.body_worker import BodyWorker
from octavo.cluster.api.caller import Caller
from octavo.cluster.api.errors import Refused
from octavo.cluster.api.requests import RequestJudge
from octavo.cluster.api.service import RouteWishes, ServedModel
from octavo.cluster.api.text import TextProcessor
from octavo.cluster.http_config import HttpConfig
from octavo.worker.errors import InvalidRequest, Unavailable

COMPLETION = "/v1/completions"
BODY = {"model": "smollm2", "prompt": "The quick brown fox"}
CALLER = Caller(RouteWishes())


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

    app = build_app(service, text, info, http=HttpConfig(max_body_bytes=ByteSize(10_000)))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://octavo") as http:
        announced = await http.post(COMPLETION, json={**BODY, "prompt": "x" * 10_000})
        answer = await http.post(COMPLETION, content=chunks(), headers={"content-type": "application/json"})
    assert num_read < 20
    assert announced.status_code == answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert "10000 bytes" in answer.json()["error"]["message"]


# ---- the other process ----


@dataclass(frozen=True)
class Told:
    pid: int
    num_bytes: int


async def who(judge: RequestJudge, raw: bytes | bytearray, caller: Caller) -> Told:
    return Told(os.getpid(), len(raw))


async def refuse(judge: RequestJudge, raw: bytes | bytearray, caller: Caller) -> None:
    raise InvalidRequest("No.", param="prompt")


async def fail(judge: RequestJudge, raw: bytes | bytearray, caller: Caller) -> None:
    raise KeyError("defect")


async def die(judge: RequestJudge, raw: bytes | bytearray, caller: Caller) -> None:
    os._exit(1)


async def linger(judge: RequestJudge, raw: bytes | bytearray, caller: Caller) -> None:
    time.sleep(60)


@pytest.fixture(scope="module")
def worker(model_dir: Path) -> Iterator[BodyWorker]:
    """With a time limit that a test can wait for and no request comes near. Its process knows this file's functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        yield from _worker(model_dir)


def _worker(model_dir: Path) -> Iterator[BodyWorker]:
    worker = BodyWorker(
        judging.JudgeRecipe(model_dir, ServedModel("smollm2", 256, created=0, max_num_seqs=32)), time_limit_s=2.0
    )
    yield worker
    worker.close()


async def test_one_process_judges_them_all(worker: BodyWorker) -> None:
    first, second = await asyncio.gather(*(worker.judge(who, bytes(size), CALLER) for size in (0, 5_000_000)))
    assert first.pid == second.pid != os.getpid()
    assert (first.num_bytes, second.num_bytes) == (0, 5_000_000)


async def test_errors_come_back_as_the_client_sees_them(worker: BodyWorker) -> None:
    with pytest.raises(Refused) as refusal:
        await worker.judge(refuse, b"", CALLER)
    assert (refusal.value.error.status, refusal.value.error.param) == (400, "prompt")
    with pytest.raises(RuntimeError, match="KeyError: 'defect'"):
        await worker.judge(fail, b"", CALLER)


async def test_large_bodies_are_answered_as_small_ones(
    service: Any, text: TextProcessor, info: ServedModel, worker: BodyWorker
) -> None:
    app = build_app(service, text, info, body_worker=worker)
    padding = {"metadata": {}, "stop": ["\u00e4" * 1_000] * 16, "user": "u"}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://octavo") as http:
        small = await http.post(COMPLETION, json={**BODY, **padding})
        raw = orjson.dumps({**BODY, **padding}) + b" " * LARGE_BYTES
        large = await http.post(COMPLETION, content=raw, headers={"content-type": "application/json"})
        bad = await http.post(COMPLETION, json={**BODY, "prompt": "p" * LARGE_BYTES, "max_tokens": -1})
    assert (small.status_code, large.status_code) == (200, 200)
    assert small.json()["choices"] == large.json()["choices"]
    assert service.requests[0].prompt_token_ids == service.requests[1].prompt_token_ids
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "max_tokens")


async def test_a_process_that_dies_is_replaced(worker: BodyWorker) -> None:
    before = await worker.judge(who, b"", CALLER)
    with pytest.raises(Unavailable):
        await worker.judge(die, b"", CALLER)
    assert (await worker.judge(who, b"", CALLER)).pid != before.pid


async def test_what_takes_too_long_is_given_up(worker: BodyWorker) -> None:
    before = await worker.judge(who, b"", CALLER)
    with pytest.raises(HTTPException) as refusal:
        await worker.judge(linger, b"", CALLER)
    assert refusal.value.status_code == 413
    assert not os.path.exists(f"/proc/{before.pid}")
