"""Streams that are under way while something happens to the cluster: each comes whole, or its error is the test's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from openai import OpenAI

PATIENCE_S = 120.0


def stream(url: str, model: str, num_tokens: int, on_token: Callable[[], object] = lambda: None) -> str:
    """A greedy completion of exactly ``num_tokens``, asked for once."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    chunks = client.completions.create(
        model=model,
        prompt="The lighthouse keeper",
        temperature=0,
        max_tokens=num_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, reasons, usage = "", [], None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.text
            reasons += [choice.finish_reason] if choice.finish_reason else []
            on_token()
    assert reasons == ["length"], f"{url}: {reasons} after {text!r}"
    assert usage is not None
    assert usage.completion_tokens == num_tokens
    return text


@contextmanager
def long_streams(urls: Sequence[str], model: str, num_tokens: int) -> Iterator[list[Future[str]]]:
    """One at each URL, all of which have begun; on leaving, all have ended, and well."""
    begun = [threading.Event() for _ in urls]
    with ThreadPoolExecutor(len(urls)) as threads:
        futures = [
            threads.submit(stream, url, model, num_tokens, event.set) for url, event in zip(urls, begun, strict=True)
        ]
        for event in begun:
            assert event.wait(PATIENCE_S)
        yield futures
        for future in futures:
            future.result(PATIENCE_S)
