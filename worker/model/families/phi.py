"""Phi-3 and Phi-4 (Abdin et al. 2024): fused projections, a part of each head rotated, LongRoPE for long contexts."""

from __future__ import annotations

from ..config import Biases, ModelConfig
from ..config_file import ConfigFile
from ..rope_config import read_rope
from .common import one_window, read_decoder


def read_phi3(source: ConfigFile) -> ModelConfig:
    return read_decoder(
        source,
        fused_projections=True,
        biases=Biases(),
        rope=read_rope(source, may_be_partial=True, longrope_names=("su", "yarn")),
        layer_windows=one_window(source),
    )
