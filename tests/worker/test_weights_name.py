"""The name of a model's weights: streams go on only where it is the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from octavo.worker.checkpoint.name import name_of_weights


@pytest.fixture
def copy(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "elsewhere" / "model"))


def test_it_is_the_same_wherever_the_files_lie(model_dir: Path, copy: Path) -> None:
    assert name_of_weights(model_dir) == name_of_weights(copy)


def test_it_is_another_one_for_trained_weights(model_dir: Path, copy: Path) -> None:
    """All of them have changed; names, shapes and sizes have not."""
    (file,) = copy.glob("*.safetensors")
    content = np.fromfile(file, np.uint8)
    content[8 + int.from_bytes(content[:8].tobytes(), "little") :] ^= 1
    content.tofile(file)
    assert name_of_weights(model_dir) != name_of_weights(copy)


def test_it_is_another_one_for_another_config(model_dir: Path, copy: Path) -> None:
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(text.replace("0", "1", 1))
    assert name_of_weights(model_dir) != name_of_weights(copy)


def test_it_is_another_one_for_other_numbers(model_dir: Path) -> None:
    names = {name_of_weights(model_dir, settings) for settings in (("float32", None), ("float32", "int8"), ())}
    assert len(names) == 3
