"""A model's folder again with other weights, as after further training: what it says is something else."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

NOISE = 0.3
"""Of a tensor's standard deviation."""


def other_weights(model_dir: Path, folder: Path) -> Path:
    """``folder``, made. Tokenizer and configuration are the same."""
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    chance = torch.Generator().manual_seed(0)
    for file in model_dir.glob("*.safetensors"):
        tensors = {name: _disturbed(tensor, chance) for name, tensor in load_file(file).items()}
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
    return folder


def _disturbed(tensor: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=chance).to(tensor.dtype)
    return tensor + NOISE * float(tensor.float().std()) * noise
