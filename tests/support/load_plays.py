"""Loads on a scripted server, and samples as they come of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scripted_api import MODEL, ScriptedApi

from octavo.cluster.load.client import Client
from octavo.cluster.load.generator import Generator, Plan
from octavo.cluster.load.sample import Run, Sample
from octavo.cluster.load.scripts import Script, Turn
from octavo.cluster.load.target import Server, Target


def scripts(count: int, num_turns: int = 1) -> Iterator[Script]:
    """Their words say which script and turn they are."""
    for number in range(count):
        yield Script("", tuple(Turn(f"script-{number} turn-{turn}", 3) for turn in range(num_turns)))


def play(api: ScriptedApi, plan: Plan, *, at: int = 0, then: Callable[[Generator], object] | None = None) -> Run:
    """``then`` is called when ``at`` requests have come."""

    async def run() -> Run:
        server = Server(api.url, {})
        async with Client(server) as client:
            generator = Generator(client, Target(server, MODEL, "/v1/completions", {}), plan)
            running = asyncio.create_task(generator.run())
            if then is not None:
                await asyncio.to_thread(api.wait_for, at)
                then(generator)
            return await running

    return asyncio.run(run())


def sample(**fields: Any) -> Sample:
    """A good one: due at 0, three tokens, at 1, 1.5 and 2 s."""
    times = {"due_s": 0.0, "free_s": 0.0, "sent_s": 0.0, "token_times_s": (1.0, 1.5, 2.0)}
    counts = {"num_prompt_tokens": 10, "num_cached_tokens": 4, "num_output_tokens": 3}
    return Sample(**{"script": 0, "turn": 0, **times, **counts, **fields})


def run_of(samples: Sequence[Sample], wall_s: float = 2.0, num_unsent: int = 0) -> Run:
    return Run(tuple(samples), num_unsent, wall_s, 0.1)
