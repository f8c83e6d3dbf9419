"""Client: sends requests to a server and reads their answers as streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from ...worker.errors import ConfigurationError, OctavoError
from .answer_stream import AnswerStream, BrokenAnswer
from .target import Server

_CONNECT_TIMEOUT_S = 10.0
_ASK_TIMEOUT_S = 30.0
_GROUP_HEADER = "x-octavo-group"
_JSON = {"Content-Type": "application/json"}


class UnexpectedAnswer(OctavoError):
    """What the server said to a question before the load."""


@dataclass(slots=True)
class Answer:
    """Of one request; times are of ``time.perf_counter``."""

    sent_s: float
    end_s: float = 0.0
    stream: AnswerStream = field(default_factory=AnswerStream)
    group: str | None = None
    error: str | None = None
    message: str = ""


class Client:
    """Connections are kept, and there are as many as there are requests at once."""

    def __init__(self, server: Server) -> None:
        self._server = server
        timeout = aiohttp.ClientTimeout(total=server.timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, ssl=not server.is_insecure)
        self._http = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=dict(server.headers))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def complete(self, path: str, body: bytes) -> Answer:
        """Errors of the server and the connection are in the answer."""
        answer = Answer(time.perf_counter())
        try:
            async with self._http.post(self._server.url + path, data=body, headers=_JSON) as response:
                await _read(response, answer)
        except BrokenAnswer as error:
            answer.error, answer.message = "error in the stream", str(error)
        except TimeoutError:
            answer.error, answer.message = "timeout", f"not over after {self._server.timeout_s:g} s"
        except aiohttp.ClientConnectorError as error:
            answer.error, answer.message = "not connected", str(error)
        except aiohttp.ClientError as error:
            answer.error, answer.message = "broken off", repr(error)
        answer.end_s = time.perf_counter()
        return answer

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON that the server answers, None where it has no such path.

        Raises ConfigurationError when it is not there or refuses the key, UnexpectedAnswer.
        """
        text = await self._ask(method, path, body)
        try:
            return None if text is None else orjson.loads(text)
        except ValueError as error:
            raise UnexpectedAnswer(f"{self._server.url}{path}: no JSON: {text!r:.200}") from error

    async def ask_text(self, path: str) -> str:
        """Raises as ``ask``."""
        text = await self._ask("GET", path, None)
        if text is None:
            raise UnexpectedAnswer(f"{self._server.url} has no {path}")
        return text.decode(errors="replace")

    async def _ask(self, method: str, path: str, body: Any) -> bytes | None:
        url, timeout = self._server.url + path, aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)
        async with _named(url), self._http.request(method, url, json=body, timeout=timeout) as response:
            text = await response.read()
            status = response.status
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise ConfigurationError("--api-key: the server asks for a key, or does not take this one")
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED):
            return None
        if status != HTTPStatus.OK:
            raise UnexpectedAnswer(f"{url}: HTTP {status}: {text.decode(errors='replace')[:300]}")
        return text


@contextlib.asynccontextmanager
async def _named(url: str) -> AsyncIterator[None]:
    """Turns errors of the connection into one that names the flag."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error) or repr(error)
        raise ConfigurationError(f"--base-url: {url} does not answer: {reason}") from error


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    answer.group = response.headers.get(_GROUP_HEADER)
    if response.status != HTTPStatus.OK:
        answer.error = f"http {response.status}"
        answer.message = (await response.read()).decode(errors="replace")[:300]
        return
    stream = answer.stream
    async for data in response.content.iter_any():
        stream.feed(data, time.perf_counter())
    if not (stream.is_over and stream.token_times_s):
        answer.error, answer.message = "cut off", "the stream ended before the answer did"


async def wait_ready(client: Client, timeout_s: float, pause_s: float = 0.5) -> None:
    """Until the server answers at all. Raises ConfigurationError when it does not in time."""
    end_s = time.perf_counter() + timeout_s
    while True:
        try:
            await client.ask("GET", "/v1/models")
            return
        except (ConfigurationError, UnexpectedAnswer):
            if time.perf_counter() >= end_s:
                raise
        await asyncio.sleep(pause_s)
