"""Llama 2 and 3 (Touvron et al. 2023; Dubey et al. 2024), and what calls itself so: SmolLM2, Yi, DeepSeek-LLM."""

from __future__ import annotations

from ..config import ModelConfig
from ..config_file import ConfigFile
from .common import read_decoder, refuse_window


def read_llama(source: ConfigFile) -> ModelConfig:
    refuse_window(source)
    return read_decoder(source)
