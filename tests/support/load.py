"""Clients that ask all the time, each one request after the other, while something is done to the cluster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from openai import OpenAI
from serve_process import ServeProcess


@contextmanager
def steady_load(server: ServeProcess, num_clients: int) -> Iterator[list[str]]:
    """The texts of all requests, when it is over: the same one, as often as the model is the same. Raises what went
    wrong with any of them."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
    ends, texts = threading.Event(), list[str]()
    begun = threading.Semaphore(0)

    def ask() -> None:
        while not ends.is_set():
            texts.append(_stream(client, server.model))
            begun.release()

    with ThreadPoolExecutor(num_clients) as threads:
        clients: list[Future[None]] = [threads.submit(ask) for _ in range(num_clients)]
        try:
            assert begun.acquire(timeout=60)
            yield texts
        finally:
            ends.set()
        for each in clients:
            each.result(120)


def _stream(client: OpenAI, model: str) -> str:
    """A text of 24 tokens, streamed; that it comes, and is whole, is the test."""
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    chunks = client.completions.create(model=model, prompt="The lighthouse keeper", stream=True, **fields)
    text, reasons = "", []
    for chunk in chunks:
        text += chunk.choices[0].text
        reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert reasons == ["length"]
    return text
