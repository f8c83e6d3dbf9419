"""Long prompts beside what runs: too long ones are refused cheaply, and the others share each step.

Bounds are on ratios within one run. A run that another program disturbed is repeated: what is always slow fails all.
"""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic, sleep

import httpx2 as httpx
import orjson
from openai import OpenAI
from serve_process import ServeProcess, wait_until

LONG_TOKENS = 3_600
"""Fourteen steps of the narrow cluster, whose context is 4,096 tokens."""

HEALTH_PERIOD_S = 0.05
ATTEMPTS = 3


@dataclass
class Ticks:
    """When each chunk of a stream arrived."""

    times: list[float] = field(default_factory=list)

    def gaps(self, since: float, until: float) -> list[float]:
        """Seconds between chunks, of those that ended within the span or were cut off by its end."""
        times = [time for time in self.times if time < until]
        return [later - max(earlier, since) for earlier, later in pairwise(times) if later > since]


class RunningStream:
    """A stream of 256 tokens, read in a thread until the end of the ``with`` block."""

    def __init__(self, client: OpenAI, server: ServeProcess) -> None:
        self.ticks = Ticks()
        self._stream = client.completions.create(
            model=server.model, prompt="Once upon a time", stream=True, temperature=0, extra_body={"ignore_eos": True}
        )
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Ticks:
        self._thread.start()
        self.wait_for(5)
        return self.ticks

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _read(self) -> None:
        with self._stream:
            for _ in self._stream:
                self.ticks.times.append(monotonic())
                if self._is_over.is_set():
                    return

    def wait_for(self, num_chunks: int) -> None:
        before = len(self.ticks.times)
        wait_until(lambda: len(self.ticks.times) >= before + num_chunks, timeout_s=60, what="a stream that goes on")


# ---- a long prompt is computed beside a stream ----


@dataclass(frozen=True)
class Shared:
    """What three requests met that shared the steps of one group."""

    gaps: list[float]
    long_s: float
    short_s: float
    alone_s: float

    @property
    def is_fair(self) -> bool:
        return (
            len(self.gaps) >= 8
            and max(self.gaps) < 5 * statistics.median(self.gaps)
            and self.short_s < self.long_s / 2
            and self.long_s < 2 * self.alone_s
        )


def test_a_long_prompt_shares_the_steps(narrow: ServeProcess, narrow_client: OpenAI) -> None:
    """Case BUG-085: the running stream gets a token in every step, a short prompt need not wait for the long one, and
    that one is not starved."""
    runs: list[Shared] = []
    while not runs or (not runs[-1].is_fair and len(runs) < ATTEMPTS):
        runs.append(share(narrow, narrow_client))
    print(*runs, sep="\n")
    assert runs[-1].is_fair, runs


def share(server: ServeProcess, client: OpenAI) -> Shared:
    alone_s = first_token_s(client, server, LONG_TOKENS)
    stream = RunningStream(client, server)
    with stream as ticks, ThreadPoolExecutor(1) as threads:
        began = monotonic()
        long: Future[float] = threads.submit(first_token_s, client, server, LONG_TOKENS)
        # While the long one waits, --max-queued-tokens leaves no room for another.
        wait_until(
            lambda: server.gauge("octavo_num_requests_running") == 2, timeout_s=60, what="the long prompt's start"
        )
        short_s = first_token_s(client, server, 20)
        long_s = long.result()
        return Shared(ticks.gaps(began, began + long_s), long_s, short_s, alone_s)


def first_token_s(client: OpenAI, server: ServeProcess, num_tokens: int) -> float:
    """Seconds until the first token of a prompt that nobody has had before."""
    prompt = [random.randrange(1_000, 40_000) for _ in range(num_tokens)]
    started = monotonic()
    client.completions.create(model=server.model, prompt=prompt, max_tokens=1)
    return monotonic() - started


# ---- prompts that are far too long ----


@dataclass(frozen=True)
class Calm:
    """How a gateway answered others while it refused huge bodies."""

    health_s: list[float]
    gaps: list[float]

    @property
    def is_calm(self) -> bool:
        p99_s = sorted(self.health_s)[int(0.99 * len(self.health_s))]
        return p99_s < 0.5 and max(self.gaps) < 1.5

    def __repr__(self) -> str:
        """The worst of each."""
        return f"Calm(health {sorted(self.health_s)[-4:]}, gaps {sorted(self.gaps)[-4:]} of {len(self.gaps)} s)"


def test_huge_bodies_do_not_stop_the_event_loop(narrow: ServeProcess, narrow_client: OpenAI) -> None:
    """Case BUG-087: prompts of 5 and 25 MB, of 200 kB many at once, and a body above the limit, while /health is asked
    every 50 ms and a stream is read."""
    # Made before the clock runs: encoding them would stop the threads of this process that watch.
    one_by_one = [chat(narrow, size) if is_chat else text(narrow, size) for size in (5, 25) for is_chat in (0, 1)]
    too_large = text(narrow, 35)
    at_once = [text(narrow, 0.2)] * 16

    def refuse_all() -> None:
        assert [body.post() for body in one_by_one] == [(400, TOO_LONG)] * 4
        assert too_large.post() == (413, "request_too_large")
        with ThreadPoolExecutor(16) as threads:
            assert set(threads.map(Body.post, at_once)) == {(400, TOO_LONG)}

    runs: list[Calm] = []
    while not runs or (not runs[-1].is_calm and len(runs) < ATTEMPTS):
        runs.append(watch(narrow, narrow_client, refuse_all))
    print(*runs, sep="\n")
    assert runs[-1].is_calm, runs


TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class Body:
    url: str
    json: bytes

    def post(self) -> tuple[int, str]:
        """Status and code of the error."""
        answer = httpx.post(self.url, content=self.json, headers={"content-type": "application/json"}, timeout=60)
        return answer.status_code, answer.json()["error"]["code"]


def chat(server: ServeProcess, size_mb: float) -> Body:
    fields = {"model": server.model, "messages": [{"role": "user", "content": words(size_mb)}]}
    return Body(f"{server.url}/v1/chat/completions", orjson.dumps(fields))


def text(server: ServeProcess, size_mb: float) -> Body:
    return Body(f"{server.url}/v1/completions", orjson.dumps({"model": server.model, "prompt": words(size_mb)}))


def words(size_mb: float) -> str:
    return "word " * int(size_mb * 1e6 / 5)


def watch(server: ServeProcess, client: OpenAI, disturb: Callable[[], None]) -> Calm:
    health_s: list[float] = []
    over = threading.Event()

    def ask_health() -> None:
        with httpx.Client() as http:
            while not over.is_set():
                started = monotonic()
                assert http.get(f"{server.url}/health", timeout=60).status_code == 200
                health_s.append(monotonic() - started)
                sleep(HEALTH_PERIOD_S)

    with RunningStream(client, server) as ticks, ThreadPoolExecutor(1) as threads:
        asker = threads.submit(ask_health)
        began = monotonic()
        try:
            disturb()
        finally:
            until = monotonic()
            over.set()
        asker.result(60)
        return Calm(health_s, ticks.gaps(began, until))
