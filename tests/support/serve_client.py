"""What tests see of a running server: the choices of an answer, streamed or not, and the sums of its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
from serve_process import ServeProcess, wait_until

IDLE_GAUGES = (
    "octavo_num_requests_running",
    "octavo_num_requests_waiting",
    "octavo_num_requests_queued",
    "octavo_num_queued_prompt_tokens",
    "octavo_kv_cache_usage_perc",
    "octavo_gateway_requests_in_flight",
    "octavo_router_reservations",
)
"""All are 0 when nothing is under way."""


@dataclass(frozen=True)
class Choices:
    """Of one answer to a chat or a completion, in the order of their index."""

    texts: tuple[str, ...]
    reasons: tuple[str | None, ...]
    usage: Any = None

    @classmethod
    def of(cls, answer: Any) -> Choices:
        """Of an answer in one piece."""
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        texts = tuple(_text(choice) for choice in answer.choices)
        return cls(texts, tuple(choice.finish_reason for choice in answer.choices), answer.usage)

    @classmethod
    def of_stream(cls, chunks: Iterable[Any], on_text: Callable[[dict[int, str]], None] | None = None) -> Choices:
        """Of a stream; each choice ends once, with nothing after it. ``on_text`` sees the texts so far, by index."""
        texts: dict[int, str] = {}
        reasons: dict[int, str] = {}
        usage = None
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                assert choice.index not in reasons, f"choice {choice.index} goes on after its end"
                texts[choice.index] = texts.get(choice.index, "") + _text(choice)
                if choice.finish_reason is not None:
                    reasons[choice.index] = choice.finish_reason
            if on_text is not None:
                on_text(texts)
        assert texts.keys() == reasons.keys() == set(range(len(texts)))
        return cls(*(tuple(by_index[index] for index in sorted(by_index)) for by_index in (texts, reasons)), usage)


def _text(choice: Any) -> str:
    if hasattr(choice, "text"):
        return str(choice.text or "")
    return str((choice.delta if hasattr(choice, "delta") else choice.message).content or "")


def metric(server: ServeProcess, name: str) -> float:
    """The sum of a metric over all its labels."""
    return _sum(httpx.get(f"{server.url}/metrics", timeout=30).text, name)


def _sum(text: str, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((name + "{", name + " ")))


def wait_until_idle(server: ServeProcess, timeout_s: float = 30.0) -> None:
    """Nothing runs, waits, holds a block or is reserved. Raises AssertionError with the gauges that are not 0."""
    busy: dict[str, float] = {}

    def is_idle() -> bool:
        busy.clear()
        text = httpx.get(f"{server.url}/metrics", timeout=30).text
        busy.update({name: value for name in IDLE_GAUGES if (value := _sum(text, name)) != 0})
        return not busy

    try:
        wait_until(is_idle, timeout_s=timeout_s, what="idle")
    except AssertionError as error:
        raise AssertionError(f"{error}: {busy}") from None
