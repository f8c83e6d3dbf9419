"""What the processes of a cluster on this machine spend, by kind. They are children of ``octavo serve``."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator

import psutil

_KINDS = {
    "gateway": re.compile(r"ray::ServeReplica:.*:Gateway"),
    "proxy": re.compile(r".*/haproxy"),
    "groups": re.compile(r"ray::(Worker|FakeHost|PacedWorker)\b"),
    "router": re.compile(r"ray::RouterCore"),
    "raylet": re.compile(r".*/raylet/raylet"),
    "GCS": re.compile(r".*/gcs_server"),
}
OTHER = "other Ray processes"
KINDS = (*_KINDS, OTHER)


def processes_of(pid: int) -> Iterator[tuple[str, psutil.Process]]:
    """With the kind of each, all that ``octavo serve`` with this number has started."""
    for process in psutil.Process(pid).children(recursive=True):
        yield kind_of(process), process


def spent_s(pid: int) -> dict[str, float]:
    """CPU seconds so far, user and system, of all processes of each kind that are alive."""
    seconds = defaultdict[str, float](float)
    for kind, process in processes_of(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            seconds[kind] += cpu_s(process)
    return seconds


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def kind_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, IndexError):
        title = process.cmdline()[0].strip()
        return next((kind for kind, pattern in _KINDS.items() if pattern.match(title)), OTHER)
    return OTHER
