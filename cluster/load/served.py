"""``octavo serve`` as a process of its own, for as long as it is measured."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...worker.errors import OctavoError

_READY = re.compile(r"ready after .*: \S+ at (?P<url>\S+)/v1")
_NUM_KEPT_LINES = 20
_STOP_TIMEOUT_S = 60.0


class NotServed(OctavoError):
    """It did not come up."""


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    """Without ``/v1``."""
    pid: int


@contextlib.contextmanager
def served(flags: Sequence[str]) -> Iterator[Served]:
    """When it is ready; it is stopped in any case. Raises NotServed with its last words."""
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo.cluster", "serve", "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C is for the load, which ends it then
    )
    try:
        with _Output(process) as output:
            yield Served(output.url(), process.pid)
    finally:
        _stop(process)


class _Output:
    """Reads what the process says, so that it never waits for a reader."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        self._url: str | None = None
        self._known = threading.Event()
        self._thread = threading.Thread(target=self._read, name="octavo serve", daemon=True)

    def __enter__(self) -> _Output:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        _stop(self._process)
        self._thread.join()

    def url(self) -> str:
        self._known.wait()
        if self._url is None:
            raise NotServed("octavo serve did not come up: " + (self._lines[-1].strip() if self._lines else "no word"))
        return self._url

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.append(line)
            if match := _READY.search(line):
                self._url = match["url"]
                self._known.set()
        self._known.set()


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
