"""What ``octavo serve`` says while it works: one line for each phase, with its seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

import orjson


class Phases:
    """Writes to a terminal or a log."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._started = time.monotonic()

    def note(self, text: str) -> None:
        """A line of its own."""
        print(f"octavo: {text}", file=self._out, flush=True)

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Says what is being done, and then how long it took."""
        started = time.monotonic()
        self.note(f"{what} …")
        yield
        self.note(f"{what}: {time.monotonic() - started:.1f} s")

    def ready(self, url: str, models: Sequence[str]) -> None:
        """The cluster serves: say what and where, and how to try it."""
        seconds = time.monotonic() - self._started
        names, trial = ",".join(models), curl_line(url, models[0])
        self.note(f"ready after {seconds:.1f} s: {names} at {url}/v1\n\n{trial}\n")


def curl_line(url: str, model: str) -> str:
    """A request that can be pasted into a shell."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    data = orjson.dumps(body).decode()
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{data}'"
