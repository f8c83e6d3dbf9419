"""GrammarDesk: a request's grammar is compiled before the engine hears of it, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from .admission import Refusal
from .errors import InvalidRequest
from .grammar import GrammarCompiler
from .messages import Request


class Line(Protocol):
    """To the engine; see ``EngineLoop``."""

    def let_in(self, request: Request) -> Refusal | None: ...

    def take(self, request: Request, holding: object = None) -> None: ...

    def abort(self, request_ids: tuple[str, ...], branch: int | None = None) -> None: ...


class GrammarDesk:
    """For one event loop, on which nothing is compiled and nobody waits.

    What is said of a request whose grammar is being compiled is told to the engine afterwards, in the same order.
    """

    def __init__(self, compiler: GrammarCompiler, *, num_threads: int = 2) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._waiting: dict[str, list[Callable[[object], None]]] = {}
        """By the requests that are being prepared: what is to be told of them, given what the engine is to hold."""

    async def load(self) -> None:
        """Read the tokenizer before anybody is served: that stops all Python of this process for about half a second.
        One that grammars cannot use refuses each request that has a grammar."""
        with contextlib.suppress(InvalidRequest):
            await asyncio.get_running_loop().run_in_executor(self._threads, self._compiler.load)

    def submit(self, request: Request, line: Line) -> Refusal | None:
        """Let a request in, and hand it over when the compiler knows its grammar, that of most at once; the grammar
        stays known until the engine has the request. One that cannot be followed is handed over too: the engine ends
        its request with the reason.

        Raises RuntimeError when the engine is over or the desk is closed.
        """
        refusal = line.let_in(request)
        if refusal is None:
            self._take(request, line)
        return refusal

    def _take(self, request: Request, line: Line) -> None:
        grammar = request.sampling.grammar
        if request.request_id in self._waiting:
            self._waiting[request.request_id].append(partial(line.take, request))
        elif grammar is None:
            line.take(request)
        elif (prototype := self._compiler.known(grammar)) is not None:
            line.take(request, prototype)
        else:
            self._prepare(request, grammar, line)

    def abort(self, request_ids: tuple[str, ...], branch: int | None, line: Line) -> None:
        """End requests, or only this branch of each."""
        for request_id in request_ids:
            if request_id in self._waiting:
                self._waiting[request_id].append(_aborting(request_id, branch, line))
            else:
                line.abort((request_id,), branch)

    def _prepare(self, request: Request, grammar: str, line: Line) -> None:
        preparing = asyncio.get_running_loop().run_in_executor(self._threads, self._compiler.prepare, grammar)

        def hand_over(_: object) -> None:
            failed = preparing.cancelled() or preparing.exception() is not None  # then it is the engine's to tell
            prototype = None if failed else preparing.result()
            for call in self._waiting.pop(request.request_id):
                call(prototype)

        self._waiting[request.request_id] = [partial(line.take, request)]
        preparing.add_done_callback(hand_over)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _aborting(request_id: str, branch: int | None, line: Line) -> Callable[[object], None]:
    return lambda _: line.abort((request_id,), branch)
