"""A name for what a model computes with: the same on all machines, and another one when its weights were replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

SAMPLES = 64
"""Of each file, spread evenly: training changes all of it, and a whole model takes minutes to read."""
SAMPLE_BYTES = 256


def name_of_weights(folder: Path, settings: Iterable[object] = ()) -> str:
    """Of the model in ``folder`` (config.json and safetensors) as it is computed with ``settings``."""
    digest = sha256(repr(tuple(settings)).encode())
    for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        for sample in _samples(file):
            digest.update(sample)
    return digest.hexdigest()[:16]


def _samples(file: Path) -> Iterator[bytes]:
    """A small file whole; of a large one the beginning, the end, and what lies at equal distances between."""
    last = max(0, file.stat().st_size - SAMPLE_BYTES)
    with file.open("rb") as opened:
        for number in range(SAMPLES):
            opened.seek(last * number // (SAMPLES - 1))
            yield opened.read(SAMPLE_BYTES)
