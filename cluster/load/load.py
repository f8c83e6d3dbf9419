"""Load: everything that is asked of a server, judged; and doing it, warm-up and repeats."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from ...worker.errors import ConfigurationError, OctavoError
from .arrivals import at_once, gamma_arrivals
from .client import Client, UnexpectedAnswer, wait_ready
from .generator import Generator, Plan
from .probe import find_model, find_words
from .progress import Progress
from .sample import Run
from .scripts import Script
from .target import Endpoint, Server, Target
from .words import Words
from .workload import Workload

Rate: TypeAlias = float | Literal["recorded"]
"""Scripts a second; infinite: as soon as ``max_concurrency`` lets them."""

OnWarm: TypeAlias = Callable[[Client, Run | None], Awaitable[None]]

_DEFAULT_NUM_SCRIPTS = 1_000
_MOST_WARMUPS_AT_ONCE = 8
_WARMUP_SEED = 2**31
_ARRIVALS = 1
"""Added to a seed, it gives another row of numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Raises ConfigurationError for what does not go together."""

    server: Server
    model: str | None
    endpoint: Endpoint
    fields: Mapping[str, Any]
    workload: Workload
    tokenizer: Path | None = None
    num_scripts: int | None = None
    """None: 1,000, or all that the workload has; without a bound where there is a duration."""
    duration_s: float | None = None
    max_concurrency: int | None = None
    rate: Rate = math.inf
    burstiness: float = 1.0
    time_scale: float = 1.0
    num_warmups: int = 0
    seed: int = 0
    num_repeats: int = 1
    ready_timeout_s: float = 0.0

    def __post_init__(self) -> None:
        there = self.workload.num_scripts
        if self.rate == "recorded" and not self.workload.has_arrivals:
            raise ConfigurationError("--request-rate: recorded needs --dataset-name trace")
        if self.num_scripts is not None and there is not None and self.num_scripts > there:
            raise ConfigurationError(f"--num-prompts: the data set has {there}, got {self.num_scripts}")
        if self.scripts_of_a_run is None and self.rate == math.inf and self.max_concurrency is None:
            raise ConfigurationError("--duration: say --max-concurrency, --request-rate or --num-prompts too")

    @property
    def scripts_of_a_run(self) -> int | None:
        """None: without a bound."""
        if self.num_scripts is not None or self.workload.num_scripts is not None:
            return self.num_scripts or self.workload.num_scripts
        return None if self.duration_s is not None else _DEFAULT_NUM_SCRIPTS

    def plan(self, words: Words, seed: int) -> Plan:
        scripts: Iterator[Script] = itertools.islice(self.workload.scripts(words, seed), self.scripts_of_a_run)
        if self.rate == "recorded":
            scripts, recorded = itertools.tee(scripts)
            return Plan(scripts, self._recorded(recorded), self.max_concurrency, self.duration_s)
        return Plan(scripts, self._arrivals(self.rate, seed), self.max_concurrency, self.duration_s)

    def warm_up_plan(self, words: Words) -> Plan:
        """Scripts that the runs do not have, in a closed loop."""
        scripts = itertools.islice(self.workload.scripts(words, self.seed + _WARMUP_SEED), self.num_warmups)
        return Plan(scripts, None, min(self.num_warmups, self.max_concurrency or _MOST_WARMUPS_AT_ONCE))

    def _arrivals(self, rate: float, seed: int) -> Iterator[float] | None:
        if math.isfinite(rate):
            return gamma_arrivals(rate, self.burstiness, np.random.default_rng((seed, _ARRIVALS)))
        return at_once() if self.max_concurrency is None else None

    def _recorded(self, scripts: Iterator[Script]) -> Iterator[float]:
        for script in scripts:
            yield (script.arrival_s or 0.0) * self.time_scale


@dataclass(slots=True)
class Outcome:
    """What was done of a load."""

    model: str
    words: Words
    server_version: Any
    """As ``/version`` says; None where there is no such path."""
    runs: list[Run] = field(default_factory=list)
    is_interrupted: bool = False


async def _nothing(client: Client, warm_up: Run | None) -> None: ...


async def perform(load: Load, progress: Progress, on_warm: OnWarm = _nothing) -> Outcome:
    """``on_warm`` is called between the warm-up, if there is one, and the runs. Ctrl-C ends it with what there is.

    Raises ConfigurationError before anything is sent, and UnexpectedAnswer.
    """
    async with Client(load.server) as client:
        await wait_ready(client, load.ready_timeout_s)
        model = await find_model(client, load.model)
        words = await find_words(client, model, load.tokenizer)
        outcome = Outcome(model, words, await _version(client))
        target = Target(load.server, model, load.endpoint, load.fields)
        warm_up = await _warm_up(Generator(client, target, load.warm_up_plan(words))) if load.num_warmups else None
        await on_warm(client, warm_up)
        for number in range(load.num_repeats):
            plan = load.plan(words, load.seed + number)
            with progress.run(number, load.scripts_of_a_run) as bar:
                generator = Generator(client, target, plan, bar.note_sample, bar.note_script)
                with _stopped_by_signal(generator, outcome):
                    outcome.runs.append(await generator.run())
            if outcome.is_interrupted:
                break
    return outcome


async def _warm_up(generator: Generator) -> Run:
    run = await generator.run()
    if not run.good():
        first = run.samples[0]
        raise UnexpectedAnswer(f"the warm-up failed: {first.error}: {first.message}")
    return run


async def _version(client: Client) -> Any:
    try:
        return await client.ask("GET", "/version")
    except OctavoError:
        return None


@contextlib.contextmanager
def _stopped_by_signal(generator: Generator, outcome: Outcome) -> Iterator[None]:
    def stop() -> None:
        outcome.is_interrupted = True
        generator.stop()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
