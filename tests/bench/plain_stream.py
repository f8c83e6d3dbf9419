"""A plain FastAPI application under uvicorn that streams chunks which are ready: what streaming costs anybody."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from ticks import next_tick, wait_s


def plain_app(chunks: list[bytes]) -> FastAPI:
    """``chunks``: the bytes of each tick, in turn."""
    app = FastAPI()

    async def events() -> AsyncIterator[bytes]:
        tick = 0
        while True:
            tick = next_tick(tick)
            await asyncio.sleep(wait_s(tick))
            yield chunks[tick % len(chunks)]

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> StreamingResponse:
        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def _serve(chunks: list[bytes], listener: socket.socket) -> None:
    uvicorn.Server(uvicorn.Config(plain_app(chunks), log_level="warning")).run([listener])


@contextmanager
def plain_server(chunks: list[bytes]) -> Iterator[tuple[int, int]]:
    """In a process of its own: its id, and its port."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(chunks, listener), daemon=True)
        process.start()
        try:
            yield process.pid or 0, listener.getsockname()[1]
        finally:
            process.terminate()
            process.join()
