"""Processes that are known for sure: a process id alone is given to somebody else after its owner's end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

POLL_S = 0.05
REST_S = 2.0
"""For the descendants, when the process that was to end them has gone."""

_START_FIELD = 19
"""Of ``/proc/PID/stat`` after the name, which may hold blanks: the start in clock ticks since boot (proc(5))."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this machine since its boot."""

    pid: int
    started: int
    """Clock ticks since boot."""
    boot: str
    name: str = ""

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """None: there is no such process."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        name, _, rest = stat.partition("(")[2].rpartition(")")
        words = rest.split()
        return None if words[0] in "ZX" else cls(pid, int(words[_START_FIELD]), _boot_id(), name)

    @property
    def is_alive(self) -> bool:
        now = ProcessId.of(self.pid)
        return now is not None and (now.started, now.boot) == (self.started, self.boot)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def tree(roots: Iterable[ProcessId]) -> list[psutil.Process]:
    """Those of ``roots`` that live, with all their descendants; each once."""
    found: dict[int, psutil.Process] = {}
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(root.pid)
            if root.is_alive:
                found |= {each.pid: each for each in (process, *process.children(recursive=True))}
    return list(found.values())


def end(roots: list[ProcessId], grace_s: float) -> list[str]:
    """SIGTERM for the first of ``roots`` that lives, whose task it is to end the others; SIGKILL for all of them and
    their descendants that live ``grace_s`` later. What was ended, by name."""
    processes = tree(roots)
    ended = [name for process in processes if (name := _name(process))]
    first = next((process for root in roots for process in processes if process.pid == root.pid), None)
    if first is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            first.terminate()
        _survivors([first], grace_s)
    survivors = _survivors(processes, REST_S)
    for process in {each.pid: each for each in (*survivors, *_children(survivors))}.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _survivors(survivors, grace_s)
    return ended


def _survivors(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run after ``timeout_s``, or none as soon as there is none. One that has ended and that nobody
    asks for its exit code, as in many containers, runs no more."""
    end_s = time.monotonic() + timeout_s
    while (left := [process for process in processes if _runs(process)]) and time.monotonic() < end_s:
        time.sleep(POLL_S)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def with_marker(module: str, marker: str) -> list[ProcessId]:
    """Processes of this user that were started as ``python -m module marker``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if module in words and words[-1] == marker and (identity := ProcessId.of(process.pid)):
                found.append(identity)
    return found


def _children(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.children(recursive=True)
    return found


def _name(process: psutil.Process) -> str:
    """What people know it by: of a Python program its module or file. Empty when it has ended."""
    try:
        words, name = process.cmdline() or [""], process.name()
    except psutil.Error:
        return ""
    title = words[0].split()[0] if words[0].startswith("ray::") else None
    programs = [Path(word).name if "/" in word else word for word in words[1:6] if _is_program(word)]
    return f"{title or (programs or [name])[0]} ({process.pid})"


def _is_program(word: str) -> bool:
    return word.endswith(".py") or word.startswith(("octavo.", "ray."))
