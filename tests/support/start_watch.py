"""What a server says of itself from before its process exists until it is ready, asked over and over."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
from serve_process import ServeProcess

PERIOD_S = 0.1
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Look:
    """Statuses of one round, in the order of asking; None: nobody listens."""

    health: int | None
    models: int | None
    serve_health: int | None
    """Of Ray Serve's own ``/-/healthz``."""
    ready: int | None
    completion: int | None
    """Of one token, asked for right after ``ready``."""


class StartWatch:
    """Looks are in ``looks``, from the ``with`` block's beginning to its end, the last one after it."""

    def __init__(self, url: str, completion: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self.looks: list[Look] = []
        self._url, self._completion, self._headers = url, completion, headers
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> StartWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, headers=dict(self._headers), timeout=TIMEOUT_S) as client:
            while not self._ends.wait(PERIOD_S):
                self.looks.append(self._look(client))
            self.looks.append(self._look(client))

    def _look(self, client: Any) -> Look:
        statuses = [_status(client, path) for path in ("/health", "/v1/models", "/-/healthz", "/ready")]
        return Look(*statuses, _status(client, "/v1/completions", dict(self._completion)))


def _status(client: Any, path: str, body: dict[str, Any] | None = None) -> int | None:
    try:
        answer = client.get(path) if body is None else client.post(path, json=body)
    except httpx.TransportError:
        return None
    return int(answer.status_code)


@dataclass(frozen=True)
class Guarded:
    """A server with an API key that was watched while it started."""

    server: ServeProcess
    looks: tuple[Look, ...]
    key: dict[str, str]
    """The header."""
