"""Clients that leave, early and in numbers: nothing of them is left, and who comes next does not notice."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import httpx2 as httpx
import psutil
from openai import OpenAI
from serve_client import Choices, wait_until_idle
from serve_process import ServeProcess

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
DRAWN = {"temperature": 1.0, "ignore_eos": True}
MIB = 2**20


def gateways(server: ServeProcess) -> list[psutil.Process]:
    return [process for process in server.processes("ray::ServeReplica") if "Gateway" in process.cmdline()[0]]


# ---- streams of several choices ----


def test_abandoned_streams_with_four_choices_leave_nothing(cluster: ServeProcess, client: OpenAI) -> None:
    """Case BUG-078: 60 streams of four choices, closed after two chunks; in some of them one choice ends before, by a
    stop string. Memory is measured between the second and the fourth quarter."""
    body = {"model": cluster.model, "messages": QUESTION, "n": 4, "max_tokens": 500, "stream": True, "seed": 11} | DRAWN
    stop = first_word_of_one_choice(client, cluster, body)
    measured = []
    for _ in range(4):
        with ThreadPoolExecutor(4) as threads:
            list(
                threads.map(
                    lambda index: abandon(cluster, body | ({"stop": stop} if index % 4 == 0 else {})), range(15)
                )
            )
        wait_until_idle(cluster)
        processes = gateways(cluster)
        assert len(processes) == 2
        measured.append((sum(p.memory_info().rss for p in processes), sum(p.num_fds() for p in processes)))
    (_, (early_rss, early_fds), _, (rss, fds)) = measured
    assert rss - early_rss < 20 * MIB, measured
    assert fds - early_fds < 20, measured


def first_word_of_one_choice(client: OpenAI, server: ServeProcess, body: dict[str, Any]) -> str:
    """The beginning of one of the four choices, which the others do not have: it ends that one at once."""
    answer = client.chat.completions.create(
        model=server.model, messages=body["messages"], n=4, seed=11, temperature=1.0, max_tokens=3
    )
    texts = Choices.of(answer).texts
    return next(text for text in texts if text and not any(text in other for other in texts if other is not text))


def abandon(server: ServeProcess, body: dict[str, Any]) -> None:
    """Read two events of a stream that would have hundreds, and close the connection."""
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        events = (line for line in response.iter_lines() if line.startswith("data: "))
        assert [next(events)[:7] for _ in range(2)]


# ---- timeouts ----


def test_hundreds_of_clients_that_give_up_at_once_take_no_place(cluster: ServeProcess) -> None:
    """Case BUG-080: clients with timeouts of 0 to 50 ms, against batches of 8 and queues of 16; some go before they
    are routed, some while they are, some while they wait. Then 20 requests are answered as before."""
    before = asyncio.run(latencies(cluster, 20))
    given_up = asyncio.run(give_up(cluster, 400))
    assert given_up > 200, "most were answered in time: this test has shown nothing"
    wait_until_idle(cluster)
    after = asyncio.run(latencies(cluster, 20))
    assert statistics.median(after) < 3 * statistics.median(before) + 0.5
    wait_until_idle(cluster)


async def give_up(server: ServeProcess, count: int) -> int:
    """How many of ``count`` clients, 40 at a time, left without an answer; the others got one, or a 429."""
    draw = random.Random(80)
    bodies = [question(server, f"Ship number {number} asks for a berth.", 200) for number in range(count)]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)

    async with httpx.AsyncClient(limits=limits) as client:

        async def ask(body: dict[str, Any], timeout_s: float) -> bool:
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await client.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
            except TimeoutError:
                return True
            assert answer.status_code in (200, 429)
            return False

        asks = [ask(body, draw.uniform(0.0, 0.05)) for body in bodies]
        return sum(await at_most(40, asks))


async def latencies(server: ServeProcess, count: int) -> list[float]:
    """Seconds of ``count`` short requests, two at a time; all are answered."""
    async with httpx.AsyncClient() as client:

        async def ask(number: int) -> float:
            started = monotonic()
            body = question(server, f"Boat number {number} leaves.", 4)
            answer = await client.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            return monotonic() - started

        return await at_most(2, [ask(number) for number in range(count)])


def question(server: ServeProcess, text: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": server.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}


async def at_most(count: int, work: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    places = asyncio.Semaphore(count)

    async def one(item: Coroutine[Any, Any, Any]) -> Any:
        async with places:
            return await item

    return list(await asyncio.gather(*map(one, work)))
