"""A server with the OpenAI API whose answers are words that a test wrote. It runs in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MODEL = "scripted"


@dataclass(frozen=True)
class Reply:
    words: tuple[str, ...] = ("one", " two", " three")
    status: int = 200
    error: str | None = None
    """In the stream, after the words."""
    is_cut: bool = False
    """The stream ends after the words, before the answer does."""
    has_usage: bool = True
    num_cached_tokens: int | None = 0
    group: str | None = None


@dataclass
class Seen:
    """A request, as the server got it."""

    body: dict[str, Any]
    path: str
    headers: dict[str, str]

    @property
    def text(self) -> str:
        if "prompt" in self.body:
            return str(self.body["prompt"])
        return " ".join(message["content"] for message in self.body["messages"])


@dataclass
class ScriptedApi:
    """``reply`` is asked with each request and its number. ``hold`` keeps all answers back until ``release``."""

    reply: Callable[[Seen, int], Reply] = lambda seen, number: Reply()
    models: tuple[str, ...] = (MODEL,)
    key: str | None = None
    count: Callable[[str], int] | None = None
    """Of ``/tokenize``; None: there is no such path."""
    metrics: list[str] = field(default_factory=list)
    """Texts of ``/metrics``, one after the other."""
    seen: list[Seen] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    url: str = ""
    _gate: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop | None = None
    _arrived: threading.Condition = field(default_factory=threading.Condition)

    def hold(self) -> None:
        self._call(self._gate.clear)

    def release(self) -> None:
        self._call(self._gate.set)

    def wait_for(self, num_requests: int) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.seen) >= num_requests, timeout=30.0)

    def _call(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function)

    async def _models(self, request: web.Request) -> web.Response:
        return self._refused(request) or web.json_response({"data": [{"id": name} for name in self.models]})

    def _refused(self, request: web.Request) -> web.Response | None:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no"}}, status=401)
        return None

    async def _tokenize(self, request: web.Request) -> web.Response:
        if self.count is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"count": self.count((await request.json())["prompt"])})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics.pop(0))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(await request.json(), request.path, dict(request.headers))
        with self._arrived:
            number = len(self.seen)
            self.seen.append(seen)
            self._arrived.notify_all()
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await self._gate.wait()
            reply = self.reply(seen, number)
            if reply.status != 200:
                return web.json_response({"error": {"message": "not now"}}, status=reply.status)
            return await _stream(request, seen, reply)
        finally:
            self.num_open -= 1

    async def _run(self, is_up: threading.Event, is_over: asyncio.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._gate.set()
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/metrics", self._metrics)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        is_up.set()
        await is_over.wait()
        self._gate.set()
        await runner.cleanup()


async def _stream(request: web.Request, seen: Seen, reply: Reply) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream"} | ({"x-octavo-group": reply.group} if reply.group else {})
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    is_chat = "messages" in seen.body
    for word in reply.words:
        await _send(response, {"choices": [_choice(is_chat, word)]})
    if reply.error is not None:
        await _send(response, {"error": {"message": reply.error}})
    elif not reply.is_cut:
        await _send(response, {"choices": [_choice(is_chat, "") | {"finish_reason": "length"}]})
        if reply.has_usage:
            await _send(response, {"choices": [], "usage": _usage(seen, reply)})
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _send(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


def _choice(is_chat: bool, text: str) -> dict[str, Any]:
    return {"index": 0, "finish_reason": None} | ({"delta": {"content": text}} if is_chat else {"text": text})


def _usage(seen: Seen, reply: Reply) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": len(seen.text.split()), "completion_tokens": len(reply.words)}
    if reply.num_cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": reply.num_cached_tokens}
    return usage


@contextmanager
def scripted_api(**fields: Any) -> Iterator[ScriptedApi]:
    api, is_up = ScriptedApi(**fields), threading.Event()
    loop = asyncio.new_event_loop()
    is_over = asyncio.Event()
    main: Coroutine[Any, Any, None] = api._run(is_up, is_over)
    thread = threading.Thread(target=loop.run_until_complete, args=(main,), daemon=True)
    thread.start()
    assert is_up.wait(30.0)
    try:
        yield api
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(30.0)
        loop.close()
