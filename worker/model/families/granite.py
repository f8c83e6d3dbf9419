"""Granite 3 (IBM Granite Team 2024): Llama with multipliers of embeddings, attention, residuals and logits.

What a layer adds to the residual is multiplied by m. Here the residual is divided by m instead, once, in the embedding:
every norm of r / m with eps / m^2 is that of r with eps, so that no layer has anything more to do.
"""

from __future__ import annotations

from ..config import ModelConfig
from ..config_file import ConfigFile
from .common import read_decoder, refuse_window


def read_granite(source: ConfigFile) -> ModelConfig:
    refuse_window(source)
    multiplier = source.positive_number("residual_multiplier", 1.0)
    eps = source.number("rms_norm_eps", default=1e-6, least=0)
    return read_decoder(
        source,
        rms_norm_eps=eps / multiplier**2,
        embedding_scale=source.positive_number("embedding_multiplier", 1.0) / multiplier,
        attention_scale=source.positive_number("attention_multiplier", 1.0),
        logit_scale=1.0 / source.positive_number("logits_scaling", 1.0),
    )
