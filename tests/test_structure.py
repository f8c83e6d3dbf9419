"""The shape of the project: which way imports point, what stays out of which module, what is installed.

Reads sources with ``ast``; nothing is imported. An import inside a function counts like one at the top, except where a
test says so.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LAYERS = ("cluster", "router", "worker", "kernels")
"""From the top down: a package may import itself and those after it."""

PLAIN_DATA = {"errors", "messages", "routing_hash", "step_plan", "wire"}
WATCHING = {"histogram", "logs", "process_metrics"}
"""The modules of ``worker`` that the router may use: plain data, and what every process of the cluster has."""

WITHOUT_TORCH = (
    *("worker.scheduler", "worker.engine", "worker.block_pool", "worker.prefix_cache", "worker.sequence"),
    *("worker.kv_memory", "worker.prefix_wait", "worker.preemption", "worker.plan_builder", "worker.live_request"),
    *("worker.waiting_queue", "worker.fair_queue", "worker.policies", "worker.head_room", "worker.token_budget"),
    *("worker.speed", "worker.beam_search", "worker.sampling_row", "worker.admission", "worker.ledger"),
    *("worker.step_thread", "worker.report_book", "worker.waiting_room", "worker.running_batch"),
    *("worker.block_needs", "worker.judge", "worker.model.config"),
)
WITHOUT_RAY = ("cluster.api", "cluster.cli", "cluster.config", "cluster.environment", "cluster.offline")
PARTS = {"starlette": "fastapi", "pydantic-core": "pydantic", "llvmlite": "numba"}
"""Distributions that come with another one, in the release that it wants."""

RAY_USERS = {"worker.actor", "worker.reporter", "router.actor"}
"""Beside the cluster: the actors, and what calls one."""


@dataclass(frozen=True)
class Import:
    """``name`` is a module or a name in one; ours begin below the package: ``worker.wire.pack``."""

    name: str
    is_ours: bool
    is_relative: bool
    is_top_level: bool


def source_files() -> Iterator[Path]:
    yield ROOT / "__init__.py"
    for layer in LAYERS:
        yield from sorted((ROOT / layer).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in source_files()}


@functools.cache
def imports(module: str) -> tuple[Import, ...]:
    path = MODULES[module]
    package = list(path.relative_to(ROOT).parent.parts)
    tree = ast.parse(path.read_text())
    return tuple(_imports(tree, package, is_top_level=True))


def _imports(node: ast.AST, package: list[str], is_top_level: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (_absolute(alias.name, is_top_level) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield from (_absolute(f"{node.module}.{alias.name}", is_top_level) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
        yield from (Import(".".join([*base, alias.name]), True, True, is_top_level) for alias in node.names)
    if not _is_for_type_checkers(node):
        inner = is_top_level and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, package, inner)


def _absolute(name: str, is_top_level: bool) -> Import:
    is_ours = name.split(".")[0] == "octavo"
    return Import(name.removeprefix("octavo."), is_ours, False, is_top_level)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def target_module(name: str) -> str:
    """The module of ours that an import of ``name`` loads: ``worker.wire`` for ``worker.wire.pack``."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name


def exists(name: str) -> bool:
    """Whether ``name`` is a module, or a name in a module that can hold one: packages here hold modules only."""
    parent = MODULES.get(name.rpartition(".")[0])
    return name in MODULES or (parent is not None and parent.name != "__init__.py")


def layer_of(module: str) -> str:
    return module.split(".")[0]


def loaded_with(module: str) -> set[str]:
    """Every module of ours that is loaded when ``module`` is imported, its packages included."""
    loaded: set[str] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if current in loaded or current not in MODULES:
            continue
        loaded.add(current)
        waiting.append(current.rpartition(".")[0])
        waiting += [target_module(item.name) for item in imports(current) if item.is_ours and item.is_top_level]
    return loaded


def names_library(item: Import, library: str) -> bool:
    return not item.is_ours and item.name.split(".")[0] == library


def modules_under(*prefixes: str) -> list[str]:
    found = [name for name in MODULES if any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)]
    assert found, f"no module under {prefixes}"
    return sorted(found)


@pytest.mark.parametrize("module", modules_under(*LAYERS))
def test_imports_point_down(module: str) -> None:
    allowed = LAYERS[LAYERS.index(layer_of(module)) :]
    wrong = [item.name for item in imports(module) if item.is_ours and layer_of(item.name) not in allowed]
    assert not wrong, f"{module} may import {allowed} only"


@pytest.mark.parametrize("module", sorted({*modules_under("router")} - {*modules_under("router.simulator")}))
def test_the_router_takes_only_plain_data_from_the_worker(module: str) -> None:
    used = {target_module(item.name) for item in imports(module) if item.is_ours and layer_of(item.name) == "worker"}
    assert used <= {f"worker.{name}" for name in PLAIN_DATA | WATCHING}


@pytest.mark.parametrize("module", [*WITHOUT_TORCH, *modules_under("router")])
def test_policy_is_loaded_without_torch(module: str) -> None:
    assert module in MODULES
    guilty = {name for name in loaded_with(module) if any(names_library(item, "torch") for item in imports(name))}
    assert not guilty, f"importing {module} imports torch in {guilty}"


def test_ray_is_imported_by_the_cluster_and_the_actors_only() -> None:
    users = {name for name in MODULES if any(names_library(item, "ray") for item in imports(name))}
    assert {name for name in users if layer_of(name) != "cluster"} <= RAY_USERS


@pytest.mark.parametrize("module", modules_under(*WITHOUT_RAY))
def test_the_http_layer_and_the_settings_are_loaded_without_ray(module: str) -> None:
    guilty = {name for name in loaded_with(module) if any(names_library(item, "ray") for item in imports(name))}
    assert not guilty, f"importing {module} imports ray in {guilty}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_inside_the_project_are_relative(module: str) -> None:
    assert not [item.name for item in imports(module) if item.is_ours and not item.is_relative]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_inside_the_project_exist(module: str) -> None:
    """A module that is only imported inside a function would otherwise be missed until that function runs."""
    missing = [item.name for item in imports(module) if item.is_ours and not exists(item.name)]
    assert not missing


@pytest.mark.parametrize("module", ["", *LAYERS])
def test_a_package_loads_nothing_by_itself(module: str) -> None:
    """``import octavo.worker.wire`` must stay cheap, and Ray may find our folders as top-level modules."""
    assert not [item.name for item in imports(module) if item.is_top_level]


def test_the_package_named_like_one_of_hugging_face_is_empty() -> None:
    """transformers looks for a package ``kernels``; ours can be on sys.path of a Ray worker."""
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    folders = {module_name(path.parent / "__init__.py") for path in source_files()}
    assert folders == packages, "a folder with modules lacks its __init__.py"
    assert sorted(listed) == sorted(f"octavo.{name}" if name else "octavo" for name in packages)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_library_that_is_imported_is_a_declared_dependency(module: str) -> None:
    libraries = {item.name.split(".")[0] for item in imports(module) if not item.is_ours} - sys.stdlib_module_names
    undeclared = {name for name in libraries if not set(distributions_of(name)) & declared_dependencies()}
    assert not undeclared


@functools.cache
def declared_dependencies() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["otel"]
    declared = {str(canonicalize_name(Requirement(line).name)) for line in lines}
    return declared | {part for part, whole in PARTS.items() if whole in declared}


def distributions_of(library: str) -> list[str]:
    return [canonicalize_name(name) for name in installed_distributions().get(library, [])]


installed_distributions = functools.cache(importlib.metadata.packages_distributions)


def test_no_file_names_a_path_of_somebody_s_machine() -> None:
    machine_path = re.compile(r"(?<![\w.~}])/(work|root|tmp|home/\w+|Users/\w+)/")
    patterns = ("*.md", "Makefile", "pyproject.toml", ".ci/*", ".github/**/*.yml", "k8s/**/*.yaml", "tests/**/*.py")
    files = [path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*files, *source_files()]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if machine_path.search(line)
    ]
    assert not found
