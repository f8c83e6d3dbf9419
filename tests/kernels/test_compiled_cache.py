"""Compiled CPU kernels are kept on disk: none may outlive a change to what it was compiled from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from numba.core.dispatcher import Dispatcher

from octavo.kernels import (
    cpu_attention,
    cpu_cache,
    cpu_elementwise,
    cpu_linear_amx,
    cpu_linear_float,
    cpu_linear_int4,
    cpu_linear_int8,
    cpu_quantize,
    cpu_sample,
)
from octavo.kernels.cpu_numba import fingerprint

TABLES = [
    cpu_attention,
    cpu_elementwise,
    cpu_linear_amx,
    cpu_linear_float,
    cpu_linear_int4,
    cpu_linear_int8,
    cpu_quantize,
    cpu_sample,
]


def kernels_of(module: ModuleType) -> Iterator[Any]:
    """Those of its tables by ``parallel``."""
    for value in vars(module).values():
        if isinstance(value, dict):
            dispatchers = (kernel for kernel in value.values() if isinstance(kernel, Dispatcher))
            yield from (kernel for kernel in dispatchers if kernel.py_func.__module__ == module.__name__)


def closed_over(kernel: Any) -> list[Any]:
    return [cell.cell_contents for cell in kernel.py_func.__closure__]


@pytest.mark.parametrize("module", TABLES, ids=lambda module: module.__name__)
def test_every_kernel_closes_over_its_sources(module: ModuleType) -> None:
    kernels = list(kernels_of(module))
    assert kernels
    assert all(fingerprint(module.__file__ or "") in closed_over(kernel) for kernel in kernels)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_so_does_what_is_built_when_it_is_first_needed(kind: str) -> None:
    assert fingerprint(cpu_cache.__file__) in closed_over(cpu_cache._build_write_kv(kind, False))


@pytest.mark.parametrize("changed", ["cpu_sample", "cpu_sample_filter", "noise", "cpu_numba"])
def test_a_fingerprint_changes_with_all_that_a_file_imports(changed: str, tmp_path: Path) -> None:
    before = fingerprint(_copy(tmp_path / "before"))
    file = _copy(tmp_path / "after")
    assert fingerprint(file) == before
    file = _copy(tmp_path / "changed")
    with (tmp_path / "changed" / f"{changed}.py").open("a") as source:
        source.write("# changed\n")
    assert fingerprint(file) != before


def _copy(folder: Path) -> str:
    """Of the kernels; the path of one."""
    shutil.copytree(Path(cpu_sample.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return str(folder / "cpu_sample.py")
