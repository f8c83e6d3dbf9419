"""``octavo serve`` as a user starts it: a process of its own, on a free port, ended by a signal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TypeAlias

import httpx2 as httpx
import psutil

READY = re.compile(r"ready after .*: (?P<model>\S+) at (?P<url>\S+)/v1")
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 90.0


class ServeProcess:
    """``ServeProcess("--replicas", "2")`` is up when the constructor returns. Its output is in ``lines``."""

    def __init__(
        self,
        *args: str,
        cwd: Path | None = None,
        environment: dict[str, str] | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.lines: list[str] = []
        command = [sys.executable, "-m", "octavo.cluster", "serve", "--port", "0", *args]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(timeout_s) or not self.url:
            self.stop()
            raise RuntimeError("octavo serve did not come up:\n" + "".join(self.lines))

    url = ""
    model = ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if match := READY.search(line):
                self.url, self.model = match["url"], match["model"]
                self._ready.set()
        self._ready.set()

    def samples(self, name: str) -> list[str]:
        """The lines of a metric: of all groups and gateways."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return [line for line in lines if line.startswith(name + "{")]

    def gauge(self, name: str) -> float:
        """The sum of a metric over all groups."""
        return total(self.samples(name))

    def descendants(self) -> list[psutil.Process]:
        """Every process that the server has started and that lives."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def workers(self) -> list[psutil.Process]:
        """The processes of the model's workers."""
        return self.processes("ray::Worker")

    def processes(self, title: str) -> list[psutil.Process]:
        """The living processes whose title begins with ``title``, in the order of their start."""
        found = [p for p in self.descendants() if _title(p).split(".")[0].split(":", 3)[:3] == title.split(":")]
        return sorted(found, key=lambda process: process.create_time())

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end; the exit code."""
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        self._reader.join(5.0)
        return code


class OneModel:
    """One of the models that a server has, as if it were the only one."""

    def __init__(self, server: ServeProcess, model: str) -> None:
        self.url = server.url
        self.model = model
        self.lines = [line for line in server.lines if line.startswith(f"octavo: {model}: ")]
        """What was said of it while it started."""
        self._server = server

    def samples(self, name: str) -> list[str]:
        """The lines of a metric: of its groups, and of all gateways."""
        return [line for line in self._server.samples(name) if f'model_name="{self.model}"' in line]

    def gauge(self, name: str) -> float:
        """The sum of a metric over its groups."""
        return total(self.samples(name))


Server: TypeAlias = ServeProcess | OneModel


def total(samples: list[str]) -> float:
    """The sum of the values of a metric's lines."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in samples)


def _title(process: psutil.Process) -> str:
    try:
        return process.cmdline()[0].strip() if process.cmdline() else ""
    except psutil.Error:
        return ""


def wait_until(condition, *, timeout_s: float, what: str) -> None:
    """Look again and again until ``condition()`` is true. Raises AssertionError with ``what`` after ``timeout_s``."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"after {timeout_s} s still not: {what}")
        time.sleep(0.1)
