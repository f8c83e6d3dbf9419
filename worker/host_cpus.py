"""The processors that this process may use: not those of the machine, where it is confined to some of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from .cgroups import own_cgroups


def num_cpus() -> int:
    """By the machine, by the processors that this process is bound to, and by the time that its containers may take."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([bound, *_quotas()])


def _quotas() -> Iterator[int]:
    for version, folder in own_cgroups("cpu"):
        quota = _quota_v2(folder) if version == 2 else _quota_v1(folder)
        if quota is not None:
            yield max(1, math.ceil(quota))


def _quota_v2(folder: Path) -> float | None:
    """Processors' worth of time; None without a limit."""
    try:
        time_us, period_us = (folder / "cpu.max").read_text().split()
        return int(time_us) / int(period_us)
    except (OSError, ValueError):  # no such file, or the word "max"
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        time_us, period_us = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return time_us / period_us if time_us > 0 else None
