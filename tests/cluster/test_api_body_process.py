"""Large bodies are judged in a process of their own."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from starlette.exceptions import HTTPException

from octavo.cluster.api.errors import Refused
from octavo.cluster.api.http import body_worker
from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.http.bodies import LARGE_BYTES
from octavo.cluster.api.http.body_worker import BodyWorker
from octavo.cluster.api.http.caller import Caller
from octavo.cluster.api.request import judging
from octavo.cluster.api.request.judged import RequestJudge
from octavo.cluster.api.request.judges import Judges
from octavo.cluster.api.service import RouteWishes, ServedModel
from octavo.cluster.api.text.processor import TextProcessor
from octavo.worker.errors import InvalidRequest, Overloaded, Unavailable

COMPLETION = "/v1/completions"
BODY = {"model": "smollm2", "prompt": "The quick brown fox"}
CALLER = Caller(RouteWishes())


@dataclass(frozen=True)
class Told:
    pid: int
    num_bytes: int


async def who(judges: Judges, raw: bytes | bytearray, caller: Caller) -> Told:
    return Told(os.getpid(), len(raw))


async def refuse(judges: Judges, raw: bytes | bytearray, caller: Caller) -> None:
    raise InvalidRequest("No.", param="prompt")


async def fail(judges: Judges, raw: bytes | bytearray, caller: Caller) -> None:
    raise KeyError("defect")


async def die(judges: Judges, raw: bytes | bytearray, caller: Caller) -> None:
    os._exit(1)


async def pause(judges: Judges, raw: bytes | bytearray, caller: Caller) -> None:
    time.sleep(0.3)


class Body(bytearray):
    """One that can be watched."""


async def linger(judges: Judges, raw: bytes | bytearray, caller: Caller) -> None:
    time.sleep(60)


@pytest.fixture(scope="module")
def worker(model_dir: Path) -> Iterator[BodyWorker]:
    """Its process knows this file's functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        yield from _worker(model_dir)


def recipe(model_dir: Path) -> judging.JudgeRecipe:
    return judging.JudgeRecipe(model_dir, ServedModel("smollm2", 256, created=0, max_num_seqs=32))


def _worker(model_dir: Path) -> Iterator[BodyWorker]:
    worker = BodyWorker([recipe(model_dir)])
    yield worker
    worker.close()


async def test_one_process_judges_them_all(worker: BodyWorker) -> None:
    first, second = await asyncio.gather(*(worker.judge(who, bytes(size), CALLER) for size in (0, 5_000_000)))
    assert first.pid == second.pid != os.getpid()
    assert (first.num_bytes, second.num_bytes) == (0, 5_000_000)


async def test_more_than_may_wait_is_refused_until_somebody_leaves(
    worker: BodyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_worker, "MAX_WAITING_BYTES", 100)
    large = asyncio.create_task(worker.judge(pause, bytes(200), CALLER))  # alone it may have any size
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await worker.judge(who, b"a", CALLER)
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    assert (await worker.judge(who, b"a", CALLER)).num_bytes == 1


async def test_a_body_that_waits_does_not_outlive_its_sender(worker: BodyWorker) -> None:
    first = asyncio.create_task(worker.judge(pause, b"", CALLER))
    await asyncio.sleep(0)
    body = Body(5)
    left, waiting = weakref.ref(body), asyncio.create_task(worker.judge(who, body, CALLER))
    del body
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    del waiting
    await asyncio.sleep(0)
    gc.collect()
    assert left() is None
    await first


async def test_a_process_that_is_starting_can_be_ended(tmp_path: Path) -> None:
    worker = BodyWorker([recipe(tmp_path / "never ready")])
    judged = asyncio.create_task(worker.judge(who, b"", CALLER))
    async with asyncio.timeout(10):
        while (child := worker._child) is None:
            await asyncio.sleep(0.001)
    await asyncio.to_thread(worker.close)
    with pytest.raises(Unavailable):
        await judged
    assert child.process.returncode == -signal.SIGKILL


async def test_errors_come_back_as_the_client_sees_them(worker: BodyWorker) -> None:
    with pytest.raises(Refused) as refusal:
        await worker.judge(refuse, b"", CALLER)
    assert (refusal.value.error.status, refusal.value.error.param) == (400, "prompt")
    with pytest.raises(RuntimeError, match="KeyError: 'defect'"):
        await worker.judge(fail, b"", CALLER)


async def test_large_bodies_are_answered_as_small_ones(
    service: Any, text: TextProcessor, info: ServedModel, worker: BodyWorker
) -> None:
    app = build_app(service, Judges([RequestJudge(text, info)]), body_worker=worker)
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


async def test_what_takes_too_long_is_given_up(worker: BodyWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    before = await worker.judge(who, b"", CALLER)
    monkeypatch.setattr(worker, "_time_limit_s", 0.1)
    with pytest.raises(HTTPException) as refusal:
        await worker.judge(linger, b"", CALLER)
    assert refusal.value.status_code == 413
    assert not os.path.exists(f"/proc/{before.pid}")
