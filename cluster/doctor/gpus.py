"""What NVML says of this node's GPUs; nothing where there is no NVML."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psutil
import pynvml

from .facts import Gpu

_READ = 0
"""NVML_P2P_CAPS_INDEX_READ, which the library has as a tuple."""

_MAX_LINKS = 18


@contextlib.contextmanager
def _nvml() -> Iterator[bool]:
    """Whether there is one."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def driver_versions() -> dict[str, str | None]:
    """Of the driver, and the newest CUDA that it runs."""
    with _nvml() as is_there:
        if not is_there:
            return {}
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        return {
            "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
            "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        }


def gpus() -> tuple[Gpu, ...]:
    """All of the node's, also those that a variable hides."""
    with _nvml() as is_there:
        if not is_there:
            return ()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(_gpu(index, handles) for index in range(len(handles)))


def _gpu(index: int, handles: list[Any]) -> Gpu:
    handle = handles[index]
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    others = [other for other in range(len(handles)) if other != index]
    return Gpu(
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        users=tuple(_users(handle)),
        num_nvlinks=sum(_has_link(handle, link) for link in range(_MAX_LINKS)),
        no_peer_access=tuple(other for other in others if not _has_peer_access(handle, handles[other])),
    )


def _users(handle: Any) -> Iterator[str]:
    with contextlib.suppress(pynvml.NVMLError):
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            with contextlib.suppress(psutil.Error):
                used = "" if process.usedGpuMemory is None else f" {process.usedGpuMemory / 2**30:.1f} GiB"
                yield f"{psutil.Process(process.pid).name()} ({process.pid}){used}"


def _has_link(handle: Any, link: int) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetNvLinkState(handle, link))
    except pynvml.NVMLError:
        return False


def _has_peer_access(handle: Any, other: Any) -> bool:
    """True where NVML does not know."""
    try:
        return bool(pynvml.nvmlDeviceGetP2PStatus(handle, other, _READ) == pynvml.NVML_P2P_STATUS_OK)
    except pynvml.NVMLError:
        return True


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
