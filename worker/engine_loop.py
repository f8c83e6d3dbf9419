"""EngineLoop: drives an Engine in a thread of its own and answers to an asyncio event loop.

The thread is the only one that touches the engine. Others hand it calls through a queue; what it has for gateways lies
in the outbox, what it has for the router in the report book, both behind one lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from .engine import Engine
from .messages import GroupReport, Request, SequenceUpdate, TokenFrame
from .outbox import Outbox
from .report_book import ReportBook

HEARTBEAT_S = 1.0
"""An idle engine tells its ranks this often that it lives."""

GATEWAY_SILENCE_S = 15.0
"""A gateway that has not polled for so long is gone; its requests are ended."""


class Heart(Protocol):
    def heartbeat(self) -> None: ...

    def shut_down(self) -> None: ...


class EngineLoop:
    """``engine_of(emit)`` makes the engine. Create it within the running event loop that will call its coroutines."""

    def __init__(
        self,
        engine_of: Callable[[Callable[[str, SequenceUpdate], None]], Engine],
        heart: Heart,
        book: ReportBook,
        generation: int,
    ) -> None:
        self._engine = engine_of(self._emit)
        self._heart = heart
        self._book = book
        self._outbox = Outbox(generation, now=time.monotonic)
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._news: dict[str, asyncio.Event] = {}
        self._woken: set[str] = set()
        self._stopped = False
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._beat_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ---- called from the event loop ----

    def submit(self, request: Request) -> None:
        """Hand over a request; its tokens come by ``poll`` of its gateway."""
        self._raise_failure()
        with self._lock:
            self._outbox.touch(request.gateway_id)
        self._calls.put(lambda: self._engine.submit(request))

    def abort(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            self._calls.put(functools.partial(self._engine.abort, request_id))

    async def poll(self, gateway_id: str, acknowledged: int, timeout_s: float) -> TokenFrame:
        """Everything new for the gateway; waits up to ``timeout_s`` for something. Raises when the engine has failed."""
        event = self._news.setdefault(gateway_id, asyncio.Event())
        self._raise_failure()
        event.clear()
        with self._lock:
            self._outbox.touch(gateway_id)
            has_news = self._outbox.has_news(gateway_id, acknowledged)
        if not has_news:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), timeout_s)
        self._raise_failure()
        with self._lock:
            return self._outbox.take(gateway_id, acknowledged)

    async def ask(self, question: Callable[[Engine], object]) -> object:
        """The answer of ``question(engine)``, asked in the engine's thread between two steps."""
        future: Future[object] = Future()

        def answer() -> None:
            try:
                future.set_result(question(self._engine))
            except Exception as error:
                future.set_exception(error)

        self._calls.put(answer)
        return await asyncio.wrap_future(future)

    def take_report(self, *, metrics_due: bool) -> GroupReport:
        """The next report for the router; what it holds is kept until ``report_arrived``.

        ``metrics_due`` lets the report after it carry the metrics.
        """
        with self._lock:
            self._book.metrics_due = self._book.metrics_due or metrics_due
            return self._book.take()

    @property
    def has_news(self) -> bool:
        """There is something to report besides the passing of time."""
        return self._book.has_news

    def report_arrived(self, report: GroupReport, *, wants_snapshot: bool) -> None:
        with self._lock:
            self._book.acknowledged(report)
        if wants_snapshot:
            self._calls.put(self._add_snapshot)

    def set_draining(self) -> None:
        with self._lock:
            self._book.draining = True

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no request is under way and all gateways that still poll have their tokens."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self._failure is None:
            num_requests = await self.ask(lambda engine: engine.num_requests)
            with self._lock:
                if num_requests == 0 and self._outbox.is_empty:
                    return True
            await asyncio.sleep(0.05)
        return False

    async def failed(self) -> BaseException:
        """Returns when the engine has failed."""
        await self._failed.wait()
        return self._failure or RuntimeError("the engine failed")

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine's thread last came round."""
        return time.monotonic() - self._beat_s

    def stop(self, timeout_s: float) -> None:
        """End the thread after the step under way, and let the other ranks go."""
        self._stopped = True
        self._calls.put(lambda: None)
        self._thread.join(timeout_s)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine failed: {self._failure}") from self._failure

    # ---- the engine's thread ----

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._beat_s = time.monotonic()
                self._take_calls()
                self._drop_silent_gateways()
                self._engine.step()
                self._publish()
            self._heart.shut_down()
        except BaseException as error:  # the thread's end is the engine's end: everybody waiting must learn of it
            self._failure = error
            self._loop.call_soon_threadsafe(self._announce_failure)

    def _take_calls(self) -> None:
        """Carry out the calls that wait; while there is nothing to compute, wait for one and beat."""
        while not self._stopped:
            try:
                call = self._calls.get(block=not self._engine.has_work, timeout=HEARTBEAT_S)
            except queue.Empty:
                if self._engine.has_work:
                    return
                self._beat_s = time.monotonic()
                self._heart.heartbeat()
                return
            call()
            self._publish()

    def _drop_silent_gateways(self) -> None:
        with self._lock:
            silent = self._outbox.drop_silent(GATEWAY_SILENCE_S)
        for gateway_id in silent:
            self._engine.abort_gateway(gateway_id)

    def _add_snapshot(self) -> None:
        with self._lock:
            self._book.add_snapshot(self._engine)

    def _emit(self, gateway_id: str, update: SequenceUpdate) -> None:
        with self._lock:
            self._outbox.put(gateway_id, update)
        self._woken.add(gateway_id)

    def _publish(self) -> None:
        with self._lock:
            self._book.collect(self._engine)
        if self._woken:
            woken, self._woken = self._woken, set()
            self._loop.call_soon_threadsafe(self._wake, woken)

    # ---- back in the event loop ----

    def _wake(self, gateway_ids: set[str]) -> None:
        for gateway_id in gateway_ids:
            if event := self._news.get(gateway_id):
                event.set()

    def _announce_failure(self) -> None:
        self._failed.set()
        self._wake(set(self._news))
