"""OLMo 2 (OLMo Team 2025): norms after attention and MLP, and of queries and keys over all heads together."""

from __future__ import annotations

from ..config import ModelConfig, NormPlacement, QueryKeyNorm
from ..config_file import ConfigFile
from .common import read_decoder, refuse_window


def read_olmo2(source: ConfigFile) -> ModelConfig:
    refuse_window(source)
    return read_decoder(
        source,
        norms=NormPlacement.AFTER,
        query_key_norm=QueryKeyNorm.PROJECTION,
        rms_norm_eps=float(source.number("rms_norm_eps", default=1e-5, least=0)),
    )
