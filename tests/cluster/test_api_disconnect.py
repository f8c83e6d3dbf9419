"""A client that goes away frees what its request holds, wherever the request is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from octavo.cluster.api.service import TokenDelta

PROMPT = {"model": "smollm2", "prompt": "The quick brown fox"}


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
async def test_case_bug_031_a_closed_stream(address: str, service: Any, num_tokens: int) -> None:
    """The engine is silent after ``num_tokens``, so only the closed connection can tell."""
    service.script = lambda _: [TokenDelta((500,))] * num_tokens
    async with httpx2.AsyncClient() as http:
        async with http.stream("POST", f"{address}/v1/completions", json={**PROMPT, "stream": True}) as answer:
            lines = answer.aiter_lines()
            while num_tokens and (await anext(lines)).startswith("data"):
                num_tokens -= 1
        await asyncio.wait_for(service.generations[0].aborted.wait(), 5)
    assert service.generations[0].num_aborts == 1


async def test_case_bug_031_a_request_without_stream(address: str, service: Any) -> None:
    reached = asyncio.Event()
    service.script = lambda _: [TokenDelta((500,)), _set(reached)]
    async with httpx2.AsyncClient() as http:
        asking = asyncio.create_task(http.post(f"{address}/v1/completions", json=PROMPT))
        await asyncio.wait_for(reached.wait(), 5)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await asyncio.wait_for(service.generations[0].aborted.wait(), 5)


async def test_case_bug_031_several_prompts(address: str, service: Any) -> None:
    service.script = lambda _: [TokenDelta((500,))]
    body = {**PROMPT, "prompt": ["a", "b", "c"], "stream": True}
    async with (
        httpx2.AsyncClient() as http,
        http.stream("POST", f"{address}/v1/completions", json=body) as answer,
    ):
        await anext(answer.aiter_lines())
    async with asyncio.timeout(5):
        for generation in service.generations:
            await generation.aborted.wait()
    assert [generation.num_aborts for generation in service.generations] == [1, 1, 1]


async def test_while_the_request_is_being_routed(address: str, service: Any) -> None:
    waiting, cancelled = asyncio.Event(), asyncio.Event()

    async def start(request: Any) -> Any:
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    service.start = start
    async with httpx2.AsyncClient() as http:
        asking = asyncio.create_task(http.post(f"{address}/v1/completions", json={**PROMPT, "stream": True}))
        await asyncio.wait_for(waiting.wait(), 5)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await asyncio.wait_for(cancelled.wait(), 5)


async def test_the_connection_serves_on_after_a_stream(address: str) -> None:
    """Case BUG-035: keep-alive survives a complete stream."""
    async with httpx2.AsyncClient(limits=httpx2.Limits(max_connections=1)) as http:
        for _ in range(3):
            answer = await http.post(f"{address}/v1/completions", json={**PROMPT, "stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")


def _set(event: asyncio.Event) -> Callable[[], Any]:
    async def step() -> None:
        event.set()

    return step
