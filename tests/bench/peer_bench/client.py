"""One streamed request to an OpenAI completions API, and when its tokens came."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from octavo.cluster.load import client as streams
from octavo.cluster.load.target import Server as Target

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
        self._http = streams.Client(Target(url, {}, timeout_s=TIMEOUT_S))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._http.__aexit__(*error)

    async def complete(self, prompt: Prompt, max_tokens: int, *, to_length: bool = True) -> Answer:
        """Greedy. ``to_length``: not shorter than ``max_tokens``. Raises PeerError when it is refused or fails."""
        server = self._server
        body: dict[str, Any] = {"model": server.model, "max_tokens": max_tokens, "temperature": 0.0, "stream": True}
        body["prompt"] = list(prompt.token_ids) if server.takes_token_ids else prompt.text
        body |= server.fields | (server.to_length if to_length else {})
        answer = await self._http.complete("/v1/completions", orjson.dumps(body))
        if answer.error is not None:
            kind = NotYet if answer.error == "http 503" else PeerError
            raise kind(f"{answer.error}: {answer.message}")
        stream = answer.stream
        if "completion_tokens" not in stream.usage:
            raise PeerError("ended an answer without counting its tokens")
        return Answer(answer.sent_s, tuple(stream.token_times_s), stream.usage["completion_tokens"], stream.text)

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
