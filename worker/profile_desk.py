"""ProfileDesk: takes orders for torch profiles of a worker group's next steps, one at a time. On the leader."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

PROFILES = "profiles"
"""Of the cache folder: where traces go."""

MOST_STEPS = 200
"""More would be hundreds of megabytes, and take minutes to write."""

WRITING_S = 60.0
"""For the trace of ``MOST_STEPS`` steps."""


class Recorder(Protocol):
    """See ``Executor.profile``."""

    def profile(self, number: int, num_steps: int) -> None: ...


class Profiler(Protocol):
    """See ``StepProfiler.expect``."""

    def expect(self) -> Future[tuple[int, str]]: ...


def trace_name(group: str, number: int, rank: int) -> str:
    """Of the file of one rank; ``number`` counts the profiles of the group."""
    return f"{group}-{number}-rank{rank}.json.gz"


class ProfileDesk:
    """``profiler`` is the leader's; the traces of all ``num_ranks`` are in ``folder``, each on its own machine."""

    def __init__(self, recorder: Recorder, profiler: Profiler, folder: Path, group: str, num_ranks: int) -> None:
        self._recorder = recorder
        self._profiler = profiler
        self._folder = folder
        self._group = group
        self._num_ranks = num_ranks
        self._number = 0
        self._is_busy = False

    async def record(self, num_steps: int, patience_s: float) -> dict[str, Any]:
        """Record up to ``num_steps`` steps, as many as there are in ``patience_s``, perhaps none: ``steps``, and
        ``files`` by rank. Else ``error``, with ``is_busy`` where another profile is under way."""
        if self._is_busy:
            return {"error": "a profile of this worker group is under way already", "is_busy": True}
        if not 1 <= num_steps <= MOST_STEPS:
            return {"error": f"steps must be from 1 to {MOST_STEPS}, got {num_steps}"}
        self._is_busy = True
        try:
            return await self._record(num_steps, patience_s)
        finally:
            self._is_busy = False

    async def _record(self, num_steps: int, patience_s: float) -> dict[str, Any]:
        self._number += 1
        done = asyncio.ensure_future(asyncio.wrap_future(self._profiler.expect()))
        self._recorder.profile(self._number, num_steps)
        await asyncio.wait({done}, timeout=patience_s)
        if not done.done():
            self._recorder.profile(self._number, 0)
            await asyncio.wait({done}, timeout=WRITING_S)
        if not done.done():
            return {"error": "the trace was not written in time"}
        num_recorded, failure = done.result()
        if failure:
            return {"error": failure}
        ranks = range(self._num_ranks if num_recorded else 0)  # without a step there is no trace
        names = [trace_name(self._group, self._number, rank) for rank in ranks]
        files = {str(rank): str(self._folder / name) for rank, name in enumerate(names)}
        return {"steps": num_recorded, "files": files}
