"""EngineLoop: drives an Engine in a thread of its own and answers to an asyncio event loop.

The thread is the only one that touches the engine. Others hand it calls through a queue; what it has for gateways lies
in the outbox, what it has for the routers in the report book, and how long its queue is in the admission, all behind
one lock.

While a step runs, the thread takes calls, until it is time to plan the next one: a request that comes meanwhile is in
that plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias, TypeVar

from .admission import Admission, Bound, Refusal
from .engine import Engine
from .messages import GroupReport, Request, SequenceUpdate, TokenFrame
from .outbox import Outbox
from .report_book import ReportBook
from .request_log import log_failed, log_received
from .snapshot_parts import snapshot_parts
from .step_watch import StepWatch

HEARTBEAT_S = 1.0
"""An idle engine tells its ranks this often that it lives."""

GATEWAY_SILENCE_S = 15.0
"""A gateway that has not polled for so long is gone; its requests are ended."""

_POLLS_IN_SILENCE = 3
"""A poll is answered so often, news or not, within the time after which its gateway would count as gone."""

T = TypeVar("T")

_Call: TypeAlias = Callable[[], None]

logger = logging.getLogger(__name__)


class Heart(Protocol):
    """What the ranks hear besides steps; see ``Executor``."""

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
        *,
        max_queued_requests: int | None = None,
        max_queued_tokens: int | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        gateway_silence_s: float = GATEWAY_SILENCE_S,
        step_timeout_s: float | None = None,
    ) -> None:
        self._engine = engine_of(self._emit)
        self._heartbeat_s = heartbeat_s
        self._gateway_silence_s = gateway_silence_s
        self._heart = heart
        self._book = book
        self._outbox = Outbox(generation, now=time.monotonic)
        self._admission = Admission(max_queued_requests, max_queued_tokens)
        self._admission.note(self._engine, ())
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        """None asks for nothing, and wakes the thread."""
        self._loop = asyncio.get_running_loop()
        self._news: dict[str, asyncio.Event] = {}
        self._emitted: list[tuple[str, SequenceUpdate]] = []
        """Updates of the step or call under way; a gateway sees them together or not at all."""
        self._snapshots_due: set[str] = set()
        """Routers for which the engine has been asked for one."""
        self._taken: list[Request] = []
        """Requests that the engine took in the call under way."""
        self._stopped = False
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._over = asyncio.Event()
        now = time.monotonic()
        self._watch = StepWatch(now, step_timeout_s)
        self._next_heartbeat_s = now + heartbeat_s
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ---- called from the event loop ----

    def let_in(self, request: Request) -> Refusal | None:
        """Whether the queue has room for a request, which is then to be handed over by ``take``; a Refusal when too
        much waits already.

        Raises RuntimeError when the engine is over.
        """
        self._raise_if_over()
        with self._lock:
            self._outbox.touch(request.gateway_id)
            return self._admission.let_in(request)

    def submit(self, request: Request) -> Refusal | None:
        """Let a request in and hand it over, unless it is refused."""
        refusal = self.let_in(request)
        if refusal is None:
            self.take(request)
        return refusal

    def take(self, request: Request, holding: object = None) -> None:
        """Hand over a request that was let in; its tokens come by ``poll`` of its gateway. ``holding`` is kept until
        the engine has it."""
        self._calls.put(functools.partial(self._take, request, holding))

    def abort(self, request_ids: tuple[str, ...], branch: int | None = None) -> None:
        """End requests, or only this branch of each."""
        for request_id in request_ids:
            self._calls.put(functools.partial(self._engine.abort, request_id, branch=branch))

    async def poll(self, gateway_id: str, acknowledged: int, timeout_s: float) -> TokenFrame:
        """Everything new for the gateway; waits up to ``timeout_s`` for something, at most a third of the time after
        which a silent gateway is dropped.

        Raises RuntimeError when the engine has failed or was stopped.
        """
        timeout_s = min(timeout_s, self._gateway_silence_s / _POLLS_IN_SILENCE)
        event = self._news.setdefault(gateway_id, asyncio.Event())
        self._raise_if_over()
        event.clear()
        with self._lock:
            self._outbox.acknowledge(gateway_id, acknowledged)
            has_news = self._outbox.has_news(gateway_id, acknowledged)
        if not has_news:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await event.wait()
        self._raise_if_over()
        with self._lock:
            return self._outbox.take(gateway_id, acknowledged)

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """The answer of ``question(engine)``, asked in the engine's thread between two steps.

        Raises RuntimeError when the engine has failed or was stopped.
        """
        self._raise_if_over()
        future: Future[T] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return  # who asked has gone
            try:
                future.set_result(question(self._engine))
            except Exception as error:
                future.set_exception(error)

        self._calls.put(answer)
        return await self._unless_over(asyncio.wrap_future(future))

    async def _unless_over(self, answer: asyncio.Future[T]) -> T:
        over = asyncio.ensure_future(self._over.wait())
        either: set[asyncio.Future[Any]] = {answer, over}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self._raise_if_over()
            return answer.result()
        finally:
            over.cancel()
            answer.cancel()

    def take_report(self, router: str) -> GroupReport:
        """The next report for the router of this name; what it holds is kept until ``report_arrived``."""
        with self._lock:
            return self._book.take(router, time.monotonic())

    def has_news(self, router: str) -> bool:
        """There is something to tell it besides the passing of time."""
        return self._book.has_news(router)

    def has_urgent_news(self, router: str) -> bool:
        """News that is more than the blocks which running requests have filled."""
        return self._book.has_urgent_news(router)

    def report_arrived(self, router: str, report: GroupReport, *, wants_snapshot: bool) -> None:
        with self._lock:
            has_missed = self._book.acknowledged(router, report)
            is_new = (wants_snapshot or has_missed) and router not in self._snapshots_due
            if is_new:
                self._snapshots_due.add(router)
        if is_new:
            self._calls.put(functools.partial(self._add_snapshot, router))

    def render_metrics(self) -> None:
        """Let the next reports carry new metrics."""
        with self._lock:
            self._book.metrics_due = True

    def set_draining(self) -> None:
        with self._lock:
            self._book.draining = True

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no request is under way and all gateways that still poll have their tokens; False: not in time.

        Raises RuntimeError when the engine has failed or was stopped.
        """
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            num_requests = await self.ask(lambda engine: engine.num_requests)
            with self._lock:
                if num_requests == 0 and self._admission.num_requests_on_way == 0 and self._outbox.is_empty:
                    return True
            await asyncio.sleep(0.05)
        return False

    async def failed(self) -> BaseException:
        """Returns when the engine has failed; never when it was stopped."""
        await self._failed.wait()
        return self._failure or RuntimeError("the engine failed")

    @property
    def num_refused(self) -> dict[Bound, int]:
        """Requests refused since the start, by what there was too much of."""
        return self._admission.num_refused

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine's thread last came round."""
        return self._watch.age_s(time.monotonic())

    @property
    def step_deadline_s(self) -> float:
        """A heartbeat older than this does not come any more; see ``StepWatch``."""
        return self._watch.deadline_s

    def stop(self, timeout_s: float) -> None:
        """End the thread after the step under way, and let the other ranks go. Polls that wait then raise."""
        self._stopped = True
        self._calls.put(None)
        self._thread.join(timeout_s)

    def _raise_if_over(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine failed: {self._failure}") from self._failure
        if self._stopped:
            raise RuntimeError("the engine was stopped")

    # ---- the engine's thread ----

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._watch.came_round(time.monotonic())
                self._drop_silent_gateways()
                self._step_or_beat()
                self._publish()
                self._take_calls()
            if (step := self._engine.in_flight) is not None:
                step.result()
            self._heart.shut_down()
        except BaseException as error:  # the thread's end is the engine's end: everybody waiting must learn of it
            self._failure = error
        self._tell(self._announce_end)
        if self._failure is not None:
            self._let_ranks_go()

    def _take_calls(self) -> None:
        """Carry out the calls that are there, and those that come while the engine has time for them."""
        while (patience_s := self._patience_s()) > 0.0:
            try:
                call = self._calls.get(timeout=patience_s)
            except queue.Empty:
                break
            self._carry_out(call)
        for _ in range(self._calls.qsize()):  # those that come meanwhile wait for the next step
            self._carry_out(self._calls.get())

    def _patience_s(self) -> float:
        """For how long calls can be waited for: until the next step is to be planned or the one in flight is done, and
        with nothing to compute until the next heartbeat."""
        step = self._engine.in_flight
        if self._stopped or (step.done() if step else self._engine.has_work):
            return 0.0
        until_s = self._engine.plan_at_s if step else self._next_heartbeat_s
        return until_s - time.monotonic()

    def _carry_out(self, call: _Call | None) -> None:
        if call is not None:
            call()
            self._publish()

    def _take(self, request: Request, holding: object) -> None:
        log_received(request)
        self._engine.submit(request)
        self._taken.append(request)

    def _drop_silent_gateways(self) -> None:
        with self._lock:
            silent = self._outbox.drop_silent(self._gateway_silence_s)
        for gateway_id in silent:
            self._engine.abort_gateway(gateway_id)
            self._tell(self._forget, gateway_id)

    def _step_or_beat(self) -> None:
        """Go on by a step. When there is none, and the ranks have not heard of us for a while, a heartbeat."""
        if self._engine.step():
            self._watch.note_step(self._engine.largest_step_s)
            if (step := self._engine.in_flight) is not None:
                step.add_done_callback(lambda _: self._calls.put(None))
        elif time.monotonic() < self._next_heartbeat_s:
            return
        else:
            self._heart.heartbeat()
        self._next_heartbeat_s = time.monotonic() + self._heartbeat_s

    def _let_ranks_go(self) -> None:
        """After a failure, as far as it goes: some rank may be gone, or in the middle of a step."""
        try:
            self._heart.shut_down()
        except Exception as error:
            logger.warning("the ranks were not told of the end: %s", error)

    def _add_snapshot(self, router: str) -> None:
        parts = snapshot_parts(self._engine.scheduler.cache.snapshot())  # takes a while: not behind the lock
        with self._lock:
            self._book.add_snapshot(self._engine, parts, router, time.monotonic())
            self._snapshots_due.discard(router)

    def _emit(self, gateway_id: str, update: SequenceUpdate) -> None:
        if update.error is not None:
            log_failed(update)
        self._emitted.append((gateway_id, update))

    def _publish(self) -> None:
        """Let the event loop have what the last step or call gave."""
        emitted, self._emitted = self._emitted, []
        taken, self._taken = self._taken, []
        with self._lock:
            self._admission.note(self._engine, taken)
            for gateway_id, update in emitted:
                self._outbox.put(gateway_id, update)
            self._book.collect(self._engine, time.monotonic())
        if emitted:
            self._tell(self._wake, {gateway_id for gateway_id, _ in emitted})

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(callback, *arguments)

    # ---- back in the event loop ----

    def _wake(self, gateway_ids: set[str]) -> None:
        for gateway_id in gateway_ids:
            if event := self._news.get(gateway_id):
                event.set()

    def _forget(self, gateway_id: str) -> None:
        self._news.pop(gateway_id, None)

    def _announce_end(self) -> None:
        if self._failure is not None:
            self._failed.set()
        self._over.set()
        self._wake(set(self._news))
