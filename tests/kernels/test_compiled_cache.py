"""Compiled CPU kernels are kept on disk: none may outlive a change to what it was compiled from."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher

from octavo.kernels import (
    cpu_attention,
    cpu_attention_plan,
    cpu_attention_work,
    cpu_cache,
    cpu_columns,
    cpu_elementwise,
    cpu_linear_amx,
    cpu_linear_float,
    cpu_linear_int4,
    cpu_linear_int8,
    cpu_logprobs,
    cpu_quantize,
    cpu_sample,
    cpu_team,
)
from octavo.kernels.cpu_amx import has_amx
from octavo.kernels.cpu_numba import fingerprint

MODULES = [
    cpu_attention,
    cpu_attention_plan,
    cpu_attention_work,
    cpu_cache,
    cpu_columns,
    cpu_elementwise,
    cpu_linear_float,
    cpu_linear_int4,
    cpu_linear_int8,
    cpu_logprobs,
    cpu_quantize,
    cpu_sample,
    cpu_team,
]
if has_amx(torch.int8):
    MODULES.append(cpu_linear_amx)

SOME: dict[str, Any] = {"kind": "int8", "dtype": torch.int8, "head_dim": 4, "group": 1}
"""What builders are told."""


def kernels_of(module: ModuleType) -> Iterator[Any]:
    """Its tables by ``parallel``, single ones, and what is built when it is first needed."""
    for value in vars(module).values():
        of_value = list(value.values()) if isinstance(value, dict) else [value]
        yield from (kernel.py_func for kernel in of_value if isinstance(kernel, Dispatcher) and _is_kernel(kernel))
        if hasattr(value, "cache_info"):
            built = value(**{name: SOME[name] for name in inspect.signature(value).parameters})
            if isinstance(built, CFunc):
                yield built.__wrapped__


def _is_kernel(dispatcher: Any) -> bool:
    """Helpers have no cache of their own."""
    return isinstance(dispatcher._cache, FunctionCache)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_kernel_closes_over_its_sources(module: ModuleType) -> None:
    own = [kernel for kernel in kernels_of(module) if kernel.__module__ == module.__name__]
    assert own
    for kernel in own:
        assert fingerprint(module.__file__ or "") in [cell.cell_contents for cell in kernel.__closure__]


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
