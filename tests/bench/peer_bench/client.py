"""One streamed request to an OpenAI completions API, and when its tokens came."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

from .errors import NotYet, PeerError
from .prompts import Prompt
from .servers import Server

TIMEOUT_S, PAUSE_S = 900.0, 0.1


@dataclass(frozen=True)
class Answer:
    """``arrivals``: when a piece of text came, or the end where no text did; seconds on the same clock as ``sent``."""

    sent: float
    arrivals: tuple[float, ...]
    num_tokens: int
    """As the server counts them."""
    text: str

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals)]


class Client:
    """Talks to one server. Errors are PeerErrors."""

    def __init__(self, server: Server, url: str) -> None:
        self._server = server
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def complete(self, prompt: Prompt, max_tokens: int, *, to_length: bool = True) -> Answer:
        """Greedy. ``to_length``: not shorter than ``max_tokens``. Raises PeerError when it is refused or fails."""
        server = self._server
        body: dict[str, Any] = {"model": server.model, "max_tokens": max_tokens, "temperature": 0.0, "stream": True}
        body["prompt"] = list(prompt.token_ids) if server.takes_token_ids else prompt.text
        body |= server.fields | (server.to_length if to_length else {})
        sent = time.perf_counter()
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    kind = NotYet if response.status_code == 503 else PeerError
                    raise kind(f"answered {response.status_code}: {(await response.aread()).decode()[:300]}")
                return await _read(sent, response)
        except httpx.HTTPError as error:
            raise PeerError(f"broke off: {error!r}") from error

    async def first_token(self, prompt: Prompt, deadline: float) -> None:
        """Ask until it serves: some are healthy before they have their model. Raises PeerError after ``deadline``."""
        while True:
            try:
                await self.complete(prompt, 1)
                return
            except NotYet:
                if time.perf_counter() > deadline:
                    raise
            await asyncio.sleep(PAUSE_S)

    async def complete_all(self, queues: Iterable[Iterable[Prompt]], max_tokens: int) -> list[Answer]:
        """A client for each queue, which sends its next request when the last one has been answered."""

        async def one_client(prompts: Iterable[Prompt]) -> list[Answer]:
            return [await self.complete(prompt, max_tokens) for prompt in prompts]

        return [answer for answers in await asyncio.gather(*map(one_client, queues)) for answer in answers]


async def _read(sent: float, response: httpx.Response) -> Answer:
    arrivals: list[float] = []
    pieces: list[str] = []
    usage = None
    async for line in response.aiter_lines():
        if not line.startswith("data:") or line.endswith("[DONE]"):
            continue
        now, chunk = time.perf_counter(), json.loads(line[len("data:") :])
        if "error" in chunk:
            raise PeerError(f"sent an error: {str(chunk['error'])[:300]}")
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            if choice["text"] or (choice.get("finish_reason") and not arrivals):
                arrivals.append(now)
                pieces.append(choice["text"] or "")
    if usage is None or not arrivals:
        raise PeerError("ended an answer without counting its tokens")
    return Answer(sent, tuple(arrivals), usage["completion_tokens"], "".join(pieces))
