"""Qwen2 and 2.5 (Yang et al. 2024), with biases of q, k and v; Qwen3 (Yang et al. 2025), with norms of query and key
heads; and its mixture of experts."""

from __future__ import annotations

from ..config import Biases, ExpertNames, ExpertsConfig, ModelConfig, QueryKeyNorm, windows_of
from ..config_file import ConfigFile
from .common import SLIDING, layer_kinds, read_decoder
from .mistral import check_expert_activation

DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28
QWEN3_HEAD_DIM = 128
MOE_NAMES = ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj")


def read_qwen2(source: ConfigFile) -> ModelConfig:
    return read_decoder(source, biases=Biases(qkv=True), layer_windows=_upper_windows(source))


def read_qwen3(source: ConfigFile) -> ModelConfig:
    return _read_qwen3(source, layer_windows=_upper_windows(source), head_dim=_head_dim(source))


def read_qwen3_moe(source: ConfigFile) -> ModelConfig:
    """Its windows, unlike the others', are those of all layers. An absent head_dim is that of the hidden size."""
    window = _window(source)
    return _read_qwen3(
        source,
        layer_windows=windows_of([window is not None] * source.positive("num_hidden_layers"), window),
        experts=_experts(source),
    )


def _read_qwen3(source: ConfigFile, **fields: object) -> ModelConfig:
    return read_decoder(source, query_key_norm=QueryKeyNorm.HEADS, **fields)


def _head_dim(source: ConfigFile) -> int:
    return source.positive("head_dim", default=QWEN3_HEAD_DIM)


def _window(source: ConfigFile) -> int | None:
    if not source.flag("use_sliding_window", default=False):
        return None
    return source.optional_positive("sliding_window", None if "sliding_window" in source.values else DEFAULT_WINDOW)


def _upper_windows(source: ConfigFile) -> tuple[int | None, ...]:
    """Layers from ``max_window_layers`` on have the window, for all its name."""
    window = _window(source)
    first = source.number("max_window_layers", default=DEFAULT_MAX_WINDOW_LAYERS, least=0)
    kinds = layer_kinds(source, lambda layer: window is not None and layer >= first)
    return windows_of([kind == SLIDING for kind in kinds], window)


def _experts(source: ConfigFile) -> ExpertsConfig:
    check_expert_activation(source)
    key = "num_local_experts" if source.values.get("num_experts") is None else "num_experts"
    num_experts = source.positive(key, default=128)
    return ExpertsConfig(
        MOE_NAMES,
        intermediate_size=source.positive("moe_intermediate_size", default=768),
        num_experts=num_experts,
        num_chosen=source.at_most("num_experts_per_tok", num_experts, key, default=8),
        renormalise=source.flag("norm_topk_prob", default=False),
        dense_layers=_dense_layers(source),
    )


def _dense_layers(source: ConfigFile) -> frozenset[int]:
    num_layers, step = source.positive("num_hidden_layers"), source.positive("decoder_sparse_step", default=1)
    listed = source.values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        source.refuse(f"mlp_only_layers is {listed!r}, expected a list of layers")
    return frozenset(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)
