"""A server's process from its start to its end: nothing of it is left afterwards, also after Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import httpx2 as httpx
import psutil

from .errors import PeerError
from .servers import Server

START_TIMEOUT_S, STOP_TIMEOUT_S, PAUSE_S = 600.0, 60.0, 0.1


class Running:
    """``with Running(server) as running``: healthy at ``running.url``; else PeerError with its last words."""

    def __init__(self, server: Server) -> None:
        self.server = server
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._folder = tempfile.TemporaryDirectory(prefix="peers-")
        self._log = Path(self._folder.name) / "log"
        self.started = time.perf_counter()
        # A folder of its own: from the repository's, the folder `kernels` would hide the package that transformers
        # looks for. A session of its own: Ctrl-C reaches the benchmark alone, which then stops it.
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                server.command(port),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self._folder.name,
                env=_environment(server),
                start_new_session=True,
            )

    def __enter__(self) -> Running:
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait_until_healthy(self) -> None:
        with httpx.Client(timeout=5.0) as client:  # one for all tries: to make one takes longer than a try
            while time.perf_counter() - self.started < START_TIMEOUT_S:
                if self._process.poll() is not None:
                    raise PeerError(f"ended at its start (exit code {self._process.returncode}): {self.last_words()}")
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                time.sleep(PAUSE_S)
        raise PeerError(f"was not ready after {START_TIMEOUT_S:.0f} s: {self.last_words()}")

    def last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-3:])[-600:] or "no output"

    def stop(self) -> None:
        """Ask it to end. What is left when it has, or after a while, or after a second Ctrl-C, is killed."""
        family = _family(self._process.pid)
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        finally:
            family += [process for process in _family(self._process.pid) if process not in family]
            for process in family:
                _kill(process)
            psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
            self._process.wait()
            self._folder.cleanup()


def _environment(server: Server) -> dict[str, str]:
    """The caller's, but compiled Python files are kept: else no second start is fast."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | server.environment


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _kill(process: psutil.Process) -> None:
    """``psutil`` refuses to kill a process that merely has the id of one that is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
