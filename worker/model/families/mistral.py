"""Mistral and Mixtral (Jiang et al. 2023, 2024): Llama with a window; Mixtral with experts as its MLP."""

from __future__ import annotations

from ..config import Activation, ExpertNames, ExpertsConfig, ModelConfig
from ..config_file import ConfigFile
from .common import activation, one_window, read_decoder

MISTRAL_WINDOW = 4096
"""Of a Mistral whose config.json does not name one."""

MIXTRAL_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


def read_mistral(source: ConfigFile) -> ModelConfig:
    default = None if "sliding_window" in source.values else MISTRAL_WINDOW
    return read_decoder(source, layer_windows=one_window(source, default))


def read_mixtral(source: ConfigFile) -> ModelConfig:
    return read_decoder(source, layer_windows=one_window(source), experts=_experts(source))


def _experts(source: ConfigFile) -> ExpertsConfig:
    check_expert_activation(source)
    num_experts = source.positive("num_local_experts", default=8)
    return ExpertsConfig(
        MIXTRAL_NAMES,
        intermediate_size=source.positive("intermediate_size"),
        num_experts=num_experts,
        num_chosen=source.at_most("num_experts_per_tok", num_experts, "num_local_experts", default=2),
        renormalise=True,
    )


def check_expert_activation(source: ConfigFile) -> None:
    """Experts' kernels know one."""
    if activation(source) is not Activation.SILU:
        source.refuse(f"hidden_act is {source.values['hidden_act']!r}; known for experts: {Activation.SILU.value}")
