"""The wheel: it builds, holds every module under ``octavo`` and nothing beside it, and each module can be imported."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("cluster", "router", "worker", "kernels")
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE", "__init__.py")

IMPORT_EVERYTHING = """
import importlib, pathlib, sys
target = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(target))
failed = []
for path in sorted((target / "octavo").rglob("*.py")):
    parts = path.relative_to(target).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    if parts[-1] == "__main__":
        continue  # importing it runs the command
    try:
        module = importlib.import_module(name)
        if not module.__file__.startswith(str(target)):
            failed.append(f"{name} came from {module.__file__}")
    except Exception as error:
        failed.append(f"{name}: {type(error).__name__}: {error}")
sys.exit("\\n".join(failed) or 0)
"""

FIND_TOP_LEVEL = """
import importlib.util
print([name for name in ("cluster", "router", "worker", "tests", "k8s") if importlib.util.find_spec(name)])
"""


def python(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the project installed from its wheel, without its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in PROJECT_FILES:
        shutil.copy(ROOT / name, source / name)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--disable-pip-version-check", "--quiet"]
    built = python("-m", "pip", "wheel", *options, "--no-build-isolation", "-w", folder, source, folder=folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("octavo-*.whl")
    placed = python("-m", "pip", "install", *options, "--target", folder / "target", wheel, folder=folder)
    assert placed.returncode == 0, placed.stderr
    return folder / "target"


def test_it_installs_one_top_level_package(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if path.name != "bin" and path.suffix != ".dist-info"}
    assert names == {"octavo"}


def test_it_holds_every_module_of_the_project(installed: Path) -> None:
    expected = {path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    found = {path.relative_to(installed / "octavo") for path in (installed / "octavo").rglob("*.py")}
    assert found == expected | {Path("__init__.py")}


def test_it_holds_every_file_of_the_live_page(installed: Path) -> None:
    files = Path("cluster", "page", "static")
    assert {path.name for path in (installed / "octavo" / files).iterdir()} == {
        path.name for path in (ROOT / files).iterdir()
    }


def test_every_module_can_be_imported_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    result = python("-c", IMPORT_EVERYTHING, installed, folder=tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_environment_has_none_of_our_packages_at_top_level(tmp_path: Path) -> None:
    """``kernels`` is not looked for: Hugging Face publishes a package of that name."""
    result = python("-c", FIND_TOP_LEVEL, folder=tmp_path)
    assert result.stdout.strip() == "[]", result.stderr


def test_it_carries_licence_and_command(installed: Path) -> None:
    (metadata,) = installed.glob("octavo-*.dist-info")
    assert list(metadata.rglob("LICENSE"))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert metadata.name == f"octavo-{version}.dist-info"
    assert "octavo = octavo.cluster.cli:main" in (metadata / "entry_points.txt").read_text()
