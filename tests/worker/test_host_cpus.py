"""A container's limits are seen from within, in both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.worker import host_cpus
from octavo.worker.cgroups import own_cgroups


def cgroup(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("memberships", "files", "expected"),
    [
        ("0::/pod/box\n", {"pod/box/cpu.max": "150000 100000", "pod/cpu.max": "max 100000"}, 2),
        ("0::/pod/box\n", {"pod/box/cpu.max": "max 100000", "pod/cpu.max": "100000 100000"}, 1),
        ("0::/pod\n", {"pod/cpu.max": "20000 100000"}, 1),
        ("0::/pod\n", {"pod/cpu.max": "max 100000"}, 8),
        ("0::/pod\n", {}, 8),
        ("4:cpu,cpuacct:/box\n", {"cpu/box/cpu.cfs_quota_us": "300000", "cpu/box/cpu.cfs_period_us": "100000"}, 3),
        ("4:cpu:/box\n", {"cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_processors_are_those_that_the_container_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memberships: str, files: dict[str, str], expected: int
) -> None:
    cgroup(tmp_path, files | {"own": memberships})
    monkeypatch.setattr(host_cpus.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(
        host_cpus, "own_cgroups", lambda name: own_cgroups(name, root=tmp_path, memberships=tmp_path / "own")
    )
    assert host_cpus.num_cpus() == expected
