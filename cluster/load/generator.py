"""Generator: plays scripts against a server, in an open or a closed loop, and takes note of each request once.

Open: scripts come at their arrivals, whatever the server does. Closed: ``max_concurrency`` people play one script after
the other. Both bounds together hold back requests that have arrived, which counts as latency.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .client import Answer, Client
from .sample import Run, Sample
from .scripts import Script, Talk
from .target import Target

INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Plan:
    """``arrivals_s`` None makes a closed loop, which needs ``max_concurrency``. ``duration_s``: nothing is sent after
    it, what is under way is finished."""

    scripts: Iterator[Script]
    arrivals_s: Iterator[float] | None
    max_concurrency: int | None = None
    duration_s: float | None = None


class _Place(NamedTuple):
    """Of a request: as in ``Sample``."""

    script: int
    turn: int
    due_s: float
    free_s: float


class Generator:
    """For one run. ``on_script`` is called with each script that is over, and ``on_sample`` with each request."""

    def __init__(
        self,
        client: Client,
        target: Target,
        plan: Plan,
        on_sample: Callable[[Sample], object] = lambda sample: None,
        on_script: Callable[[], object] = lambda: None,
    ) -> None:
        self._client, self._target, self._plan = client, target, plan
        self._on_sample, self._on_script = on_sample, on_script
        self._samples: list[Sample] = []
        self._num_unsent = 0
        self._num_scripts = 0
        self._begin_s = 0.0
        self._main: asyncio.Task[None] | None = None
        self._slots: asyncio.Semaphore | None = None
        """Of an open loop with a bound."""
        if plan.max_concurrency is not None and plan.arrivals_s is not None:
            self._slots = asyncio.Semaphore(plan.max_concurrency)

    async def run(self) -> Run:
        cpu_s, self._begin_s = time.process_time(), time.perf_counter()
        arrivals_s = self._plan.arrivals_s
        self._main = asyncio.create_task(self._closed() if arrivals_s is None else self._open(arrivals_s))
        with contextlib.suppress(asyncio.CancelledError):
            await self._main
        ends_s = [sample.token_times_s[-1] for sample in self._samples if sample.is_good]
        wall_s = max(ends_s, default=time.perf_counter() - self._begin_s)
        return Run(tuple(self._samples), self._num_unsent, wall_s, time.process_time() - cpu_s)

    def stop(self) -> None:
        """End it now: what is under way is noted as interrupted."""
        if self._main is not None:
            self._main.cancel()

    async def _open(self, arrivals_s: Iterator[float]) -> None:
        async with asyncio.TaskGroup() as group:
            for script in self._plan.scripts:
                if (arrival_s := next(arrivals_s, None)) is None or self._is_over(arrival_s):
                    break
                await self._sleep_until(arrival_s)
                group.create_task(self._play(script, arrival_s))

    async def _closed(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._plan.max_concurrency or 1):
                group.create_task(self._play_one_after_another())

    async def _play_one_after_another(self) -> None:
        while not self._is_over(self._now_s()) and (script := next(self._plan.scripts, None)) is not None:
            await self._play(script, self._now_s())

    async def _play(self, script: Script, due_s: float) -> None:
        number, talk = self._num_scripts, Talk(script)
        self._num_scripts += 1
        num_sent = 0
        try:
            for turn_number, turn in enumerate(script.turns):
                due_s += turn.pause_s
                if self._is_over(due_s):
                    break
                await self._sleep_until(due_s)
                talk.ask(turn)
                async with self._slot(due_s) as free_s:
                    if self._is_over(free_s):
                        break
                    num_sent += 1
                    answer = await self._send(talk, turn.num_output_tokens, _Place(number, turn_number, due_s, free_s))
                if answer.error is not None:
                    break
                talk.note_answer(answer.stream.text)
                due_s = answer.stream.token_times_s[-1] - self._begin_s
        finally:
            self._num_unsent += len(script.turns) - num_sent
            self._on_script()

    @contextlib.asynccontextmanager
    async def _slot(self, due_s: float) -> AsyncIterator[float]:
        """Holds back what is over ``max_concurrency``; gives when nothing stood in the way of a request any more."""
        if self._slots is None:
            yield due_s
            return
        is_full = self._slots.locked()
        async with self._slots:
            yield self._now_s() if is_full else due_s

    async def _send(self, talk: Talk, num_output_tokens: int, place: _Place) -> Answer:
        body = self._target.body(talk, num_output_tokens)
        sent_s = self._now_s()
        try:
            answer = await self._client.complete(self._target.endpoint, body)
        except asyncio.CancelledError:
            self._note(place, sent_s, error=INTERRUPTED)
            raise
        self._note(place, answer.sent_s - self._begin_s, **self._outcome(answer))
        return answer

    def _outcome(self, answer: Answer) -> dict[str, Any]:
        usage = answer.stream.usage
        return {
            "token_times_s": tuple([time_s - self._begin_s for time_s in answer.stream.token_times_s]),
            "num_prompt_tokens": usage.get("prompt_tokens"),
            "num_cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            "num_output_tokens": usage.get("completion_tokens"),
            "group": answer.group,
            "error": answer.error,
            "message": answer.message,
        }

    def _note(self, place: _Place, sent_s: float, **outcome: Any) -> None:
        sample = Sample(**place._asdict(), sent_s=sent_s, **outcome)
        self._samples.append(sample)
        self._on_sample(sample)

    def _is_over(self, time_s: float) -> bool:
        return self._plan.duration_s is not None and time_s >= self._plan.duration_s

    def _now_s(self) -> float:
        return time.perf_counter() - self._begin_s

    async def _sleep_until(self, time_s: float) -> None:
        """Gives way to others in any case: what is late must not go out in one piece."""
        await asyncio.sleep(max(0.0, time_s - self._now_s()))
