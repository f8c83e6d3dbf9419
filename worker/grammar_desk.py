"""GrammarDesk: a request's grammar is compiled before the engine hears of it, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .errors import InvalidRequest
from .grammar import GrammarCompiler
from .messages import Request

T = TypeVar("T")


class GrammarDesk:
    """For one event loop, on which nothing is compiled. What is said of a request meanwhile has to wait its turn."""

    def __init__(self, compiler: GrammarCompiler, *, num_threads: int = 2) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._preparing: dict[str, asyncio.Event] = {}

    async def load(self) -> None:
        """Read the tokenizer before anybody is served: that stops all Python of this process for about half a second.
        One that grammars cannot use refuses each request that has a grammar."""
        with contextlib.suppress(InvalidRequest):
            await asyncio.get_running_loop().run_in_executor(self._threads, self._compiler.load)

    async def submit(self, request: Request, submit: Callable[[Request], T]) -> T:
        """``submit(request)``, when the compiler knows its grammar: that of most requests at once.

        A grammar that cannot be followed is submitted too: the engine ends the request with the reason.
        """
        grammar = request.sampling.grammar
        if grammar is None or self._compiler.is_known(grammar):
            return submit(request)
        done = self._preparing[request.request_id] = asyncio.Event()
        try:
            with contextlib.suppress(InvalidRequest):
                await asyncio.get_running_loop().run_in_executor(self._threads, self._compiler.prepare, grammar)
            return submit(request)
        finally:
            done.set()
            del self._preparing[request.request_id]

    async def settled(self, request_ids: Iterable[str]) -> None:
        """Wait until those of them that are being prepared have been submitted."""
        for request_id in request_ids:
            if (done := self._preparing.get(request_id)) is not None:
                await done.wait()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
