"""The cgroups around this process (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIPS = Path("/proc/self/cgroup")


class Cgroup(NamedTuple):
    version: int
    folder: Path


def own_cgroups(controller: str, *, root: Path = ROOT, memberships: Path = _MEMBERSHIPS) -> Iterator[Cgroup]:
    """Those whose files may limit ``controller``, in both versions, each from this process's own to the root."""
    try:
        lines = memberships.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _upwards(2, root, path)
        elif controller in controllers.split(","):
            yield from _upwards(1, root / controller, path)


def _upwards(version: int, root: Path, path: str) -> Iterator[Cgroup]:
    own = root / path.lstrip("/")
    for folder in (own, *own.parents):
        yield Cgroup(version, folder)
        if folder == root:
            return
