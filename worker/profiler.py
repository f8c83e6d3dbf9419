"""StepProfiler: a torch profile of a rank's next steps, as a trace that chrome://tracing and Perfetto show.

The leader broadcasts a plan of kind PROFILE, so that all ranks record the same steps. Recording begins and ends in the
thread that runs the steps, since torch records the thread that began. Nothing of a step changes, but for its time. What
goes wrong in here is the profile's end, not the rank's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .profile_desk import trace_name

logger = logging.getLogger(__name__)


class StepProfiler:
    """Of one rank; traces go to ``folder``."""

    def __init__(self, folder: Path, group: str, rank: int, device: torch.device) -> None:
        self._folder = folder
        self._group = group
        self._rank = rank
        self._device = device
        self._profile: Any = None
        self._number = 0
        self._num_left = 0
        self._num_steps = 0
        self._done: Future[tuple[int, str]] | None = None
        self._writer: threading.Thread | None = None

    def expect(self) -> Future[tuple[int, str]]:
        """(How many steps were recorded, why it failed or nothing) of the profile that is begun next, when its trace is
        written."""
        self._done = Future()
        return self._done

    @property
    def is_recording(self) -> bool:
        return self._profile is not None

    def begin(self, number: int, num_steps: int) -> None:
        """Record the next ``num_steps`` steps. 0 ends what is recorded now, however many those are."""
        if num_steps == 0:
            self._end()
            return
        self._number, self._num_left, self._num_steps = number, num_steps, 0
        try:
            self._profile = self._new_profile()
            self._profile.start()
        except Exception as error:
            self._profile = None
            self._tell(f"the profile could not begin: {error}")

    def _new_profile(self) -> Any:
        from torch.profiler import ProfilerActivity, profile

        on_gpu = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        return profile(activities=[ProfilerActivity.CPU, *on_gpu])

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step, in the thread that runs it."""
        if self._profile is None:
            yield
            return
        with torch.profiler.record_function(f"octavo step {number}"):
            yield
        self._num_steps += 1
        self._num_left -= 1
        if self._num_left == 0:
            self._end()

    def _end(self) -> None:
        recorded, self._profile = self._profile, None
        if recorded is None:
            return
        try:
            if self._device.type == "cuda":  # the kernels of the last steps are still under way
                torch.cuda.synchronize(self._device)
            recorded.stop()
        except Exception as error:
            self._tell(f"the profile could not end: {error}")
            return
        self._writer = threading.Thread(target=self._write, args=(recorded,), name="profile", daemon=True)
        self._writer.start()

    def _write(self, recorded: Any) -> None:
        path = self._folder / trace_name(self._group, self._number, self._rank)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
        except Exception as error:
            self._tell(f"{path} could not be written: {error}")
        else:
            logger.info("a profile of %d steps is in %s", self._num_steps, path)
            self._tell("")

    def _tell(self, failure: str) -> None:
        if failure:
            logger.error(failure)
        done, self._done = self._done, None
        if done is not None:
            done.set_result((self._num_steps, failure))
