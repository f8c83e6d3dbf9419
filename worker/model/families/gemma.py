"""Gemma 2 and 3 (Gemma Team 2024, 2025): windows in most layers, norms around attention and MLP, scaled embeddings;
soft caps in Gemma 2, norms of query and key heads and a rotary base for window layers in Gemma 3."""

from __future__ import annotations

import math
from typing import Any

from ..config import Activation, Biases, ModelConfig, NormPlacement, QueryKeyNorm, windows_of
from ..config_file import ConfigFile
from ..rope_config import RopeConfig, read_rope
from .common import FULL, SLIDING, activation, layer_kinds, read_decoder, refuse

DEFAULT_WINDOW = 4096
HEAD_DIM = 256
GEMMA3_PATTERN = 6
"""Every sixth layer sees all keys."""
THETA, WINDOW_THETA = 1_000_000.0, 10_000.0


def read_gemma2(source: ConfigFile) -> ModelConfig:
    return _read_gemma(source, pattern=2, attention_cap=50.0, logit_cap=30.0)


def read_gemma3(source: ConfigFile) -> ModelConfig:
    pattern = source.positive("sliding_window_pattern", default=GEMMA3_PATTERN)
    return _read_gemma(
        source,
        pattern=pattern,
        query_key_norm=QueryKeyNorm.HEADS,
        rope=_rope(source, FULL),
        window_rope=_rope(source, SLIDING),
    )


def _read_gemma(
    source: ConfigFile,
    *,
    pattern: int,
    attention_cap: float | None = None,
    logit_cap: float | None = None,
    **family: Any,
) -> ModelConfig:
    refuse(source, "use_bidirectional_attention")
    kinds = layer_kinds(source, lambda layer: (layer + 1) % pattern != 0)
    window = source.optional_positive("sliding_window", DEFAULT_WINDOW)
    attention_bias = source.flag("attention_bias", default=False)
    return read_decoder(
        source,
        activation=activation(source, "hidden_activation", Activation.GELU_TANH),
        biases=Biases(qkv=attention_bias, out=attention_bias),
        head_dim=source.positive("head_dim", default=HEAD_DIM),
        tie_word_embeddings=source.flag("tie_word_embeddings", default=True),
        layer_windows=windows_of([kind == SLIDING for kind in kinds], window),
        norms=NormPlacement.AROUND,
        norm_offset=1.0,
        attention_scale=source.positive_number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_soft_cap=source.optional_positive_number("attn_logit_softcapping", attention_cap),
        logit_soft_cap=source.optional_positive_number("final_logit_softcapping", logit_cap),
        embedding_scale=math.sqrt(source.positive("hidden_size")),
        **family,
    )


def _rope(source: ConfigFile, kind: str) -> RopeConfig:
    """Since transformers 5 each kind of layer has parameters of its own; before, only the base of window layers had."""
    theta = THETA if kind == FULL else WINDOW_THETA
    nested = source.within("rope_parameters")
    if FULL in nested.values or SLIDING in nested.values:
        own = nested.within(kind).values
        return read_rope(source.replaced(rope_parameters={"rope_theta": theta, **own}, rope_scaling=None))
    if kind == FULL:
        return read_rope(source.replaced(rope_theta=source.values.get("rope_theta", theta)))
    theta = source.values.get("rope_local_base_freq", theta)
    return read_rope(source.replaced(rope_theta=theta, rope_scaling=None, rope_parameters=None))
