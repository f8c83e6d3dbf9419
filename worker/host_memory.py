"""The memory of this machine, or of the container that holds this process, and this process's part in it."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from .cgroups import own_cgroups

_STATUS = Path("/proc/self/status")
_FORGET_PEAK = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """In bytes. Of the machine, or of the tightest memory cgroup around this process."""

    total: int
    available: int
    """What can be had without swapping; the page cache counts, as it gives way."""


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    """Where a version of cgroups says what."""

    limit: str
    usage: str
    reclaimable: str
    """Line of memory.stat: page cache that nobody has used lately."""


_V1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _CgroupFiles("memory.max", "memory.current", "inactive_file")


def host_memory() -> HostMemory:
    machine = psutil.virtual_memory()
    views = [HostMemory(machine.total, machine.available), *_cgroup_views()]
    return HostMemory(min(view.total for view in views), min(view.available for view in views))


def own_bytes() -> int:
    """What would be free if this process ended: its resident memory without what others map as well."""
    return int(psutil.Process().memory_full_info().uss)


def peak_growth(work: Callable[[], object]) -> int:
    """Bytes by which this process's resident memory grew at the most while ``work`` ran.

    Linux forgets the peak of before on request (proc(5), clear_refs). Elsewhere a higher peak of before stands in for
    that of ``work``: too large then, never too small.
    """
    resident = int(psutil.Process().memory_info().rss)
    with contextlib.suppress(OSError):
        _FORGET_PEAK.write_text("5")
    work()
    return max(0, _peak() - resident)


def _peak() -> int:
    """Of resident memory. Not ru_maxrss where there is better: Linux hands it down from the process before an exec."""
    if _STATUS.exists():
        return _number_after(_STATUS, "VmHWM:") * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _cgroup_views() -> Iterator[HostMemory]:
    """Each memory limit around this process, from its own cgroup to the root."""
    for version, folder in own_cgroups("memory"):
        if (view := _view(_V2 if version == 2 else _V1, folder)) is not None:
            yield view


def _view(files: _CgroupFiles, folder: Path) -> HostMemory | None:
    """None where there is no limit: no file, or the word "max"."""
    try:
        limit = int((folder / files.limit).read_text())
        used = int((folder / files.usage).read_text())
    except (OSError, ValueError):
        return None
    reclaimable = _number_after(folder / "memory.stat", files.reclaimable)
    return HostMemory(limit, max(0, limit - max(0, used - reclaimable)))


def _number_after(file: Path, word: str) -> int:
    """The number in the line of ``file`` that begins with ``word``; 0 where there is none."""
    for line in file.read_text().splitlines():
        if line.split()[:1] == [word]:
            return int(line.split()[1])
    return 0
