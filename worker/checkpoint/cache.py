"""A folder that is made once, whole or not at all.

``cached_folder`` builds into a folder beside the target and renames it when it is complete. A manifest holds the size
and SHA-256 of each file; a folder that does not fit its manifest is made again. A file lock lets one process build
while the others wait for it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

MANIFEST = "manifest.json"

Report = Callable[[str], None]


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_folder(target: Path, build: Callable[[Path], None], report: Report) -> Path:
    """``target``, complete: as it is, or filled by ``build(folder)`` when it is missing or damaged."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target, report):
        if target.exists() and not is_intact(target):
            report(f"{target} is damaged or incomplete: making it again")
            shutil.rmtree(target)
        if not target.exists():
            _build_and_rename(target, build)
    return target


class locked:
    """The lock beside ``target``, between processes; says so when it has to wait."""

    def __init__(self, target: Path, report: Report) -> None:
        self._lock = FileLock(target.with_name(target.name + ".lock"))
        self._report = report
        self._target = target

    def __enter__(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            self._report(f"waiting for another process that prepares {self._target}")
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def is_intact(folder: Path) -> bool:
    """Whether every file of the folder's manifest is there, with the size and the SHA-256 that it had when written."""
    try:
        files: dict[str, dict[str, object]] = json.loads((folder / MANIFEST).read_text())["files"]
        return all(_describe(folder / name, cheaply=entry) == entry for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _describe(path: Path, cheaply: dict[str, object] | None = None) -> dict[str, object]:
    """Size and checksum; when the size already contradicts ``cheaply``, the checksum is left out."""
    size = path.stat().st_size
    if cheaply is not None and cheaply["bytes"] != size:
        return {"bytes": size}
    return {"bytes": size, "sha256": sha256_of(path)}


def _build_and_rename(target: Path, build: Callable[[Path], None]) -> None:
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        build(unfinished)
        files = {path.name: _describe(path) for path in sorted(unfinished.iterdir())}
        (unfinished / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n")
        unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
