"""``--dtype auto`` on CPUs is the checkpoint's dtype where that is at least as fast as float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.kernels.backend import reference_kernels
from octavo.worker.model.config import ModelConfig
from octavo.worker.model.dtype import choose_dtype, speed_of_half

CPU = torch.device("cpu")


@pytest.fixture
def stored_as_bfloat16(tmp_path: Path, model_dir: Path) -> ModelConfig:
    config = json.loads((model_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("setting", "speed", "chosen"),
    [
        ("auto", 1.0, torch.bfloat16),
        ("auto", 0.99, torch.float32),
        ("bfloat16", 0.1, torch.bfloat16),
        ("float32", 9.0, torch.float32),
    ],
)
def test_speed_decides_what_was_not_asked_for(
    stored_as_bfloat16: ModelConfig, setting: str, speed: float, chosen: torch.dtype
) -> None:
    assert choose_dtype(setting, stored_as_bfloat16, CPU, lambda dtype: speed) is chosen


def test_what_is_slower_is_told_with_its_ratio(stored_as_bfloat16: ModelConfig) -> None:
    lines: list[str] = []
    for setting in ("auto", "bfloat16", "float16"):
        choose_dtype(setting, stored_as_bfloat16, CPU, lambda dtype: 0.123, lines.append)
    assert [line.partition(" products")[0] for line in lines] == [
        "--dtype auto is float32: bfloat16",
        "--dtype bfloat16 is bfloat16: bfloat16",
        "--dtype float16 is float16: float16",
    ]
    assert all("at 0.12 times float32's speed" in line for line in lines)


def test_float32_is_not_measured(model_dir: Path, stored_as_bfloat16: ModelConfig) -> None:
    def speed(dtype: torch.dtype) -> float:
        raise AssertionError("measured")

    assert choose_dtype("auto", ModelConfig.from_folder(model_dir), CPU, speed) is torch.float32
    assert choose_dtype("float32", stored_as_bfloat16, CPU, speed) is torch.float32


def test_a_measured_speed_is_a_ratio(stored_as_bfloat16: ModelConfig) -> None:
    """That it is right cannot be tested here; that both dtypes are multiplied can."""
    asked: list[torch.dtype] = []
    kernels = reference_kernels()

    def prepare(weight, bias=None):  # type: ignore[no-untyped-def]
        asked.append(weight.dtype)
        return kernels.prepare_linear(weight, bias)

    assert 0 < speed_of_half(torch.bfloat16, stored_as_bfloat16, replace(kernels, prepare_linear=prepare)) < 1000
    assert asked == [torch.float32, torch.bfloat16]
