"""From the setting ``--dtype`` to the torch dtype of weights and KV."""

from __future__ import annotations

import torch

from ..errors import ConfigurationError
from .config import DTYPES, ModelConfig


def choose_dtype(setting: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """``auto`` is the checkpoint's own dtype on GPUs (bfloat16 for float32 weights) and float32 on CPUs.

    Raises ConfigurationError for an unknown setting.
    """
    if setting not in ("auto", *DTYPES):
        raise ConfigurationError(f"--dtype is {setting!r}; known: auto, {', '.join(DTYPES)}")
    name = _automatic(config, device) if setting == "auto" else setting
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _automatic(config: ModelConfig, device: torch.device) -> str:
    """CPUs multiply float32 faster than half precision, unless they have matrix units for it."""
    if device.type == "cpu":
        return "float32"
    return "bfloat16" if config.dtype == "float32" else config.dtype
