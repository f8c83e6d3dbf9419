"""Every family computes what transformers does: tiny random models of its configurations, over one rank and two, in one
prompt, and in a prompt, a chunk and single tokens, with windows shorter than the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from prompt_plan import LENGTH, compute, expected_logits
from torch import nn

from octavo.worker.model.families.registry import FAMILIES

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
UP_TO_16 = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.0, 1.1, 1.2], "long_factor": [1.0, 2.0, 3.0, 4.0]}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7}
GEMMA = {"sliding_window": 7, "query_pre_attn_scalar": 24}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, gelu": ("Llama", {"hidden_act": "gelu"}),
    "llama, gelu by tanh": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "llama, dynamic, beyond its context": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 16}),
    "mistral, a window": ("Mistral", {"sliding_window": 7}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows above": ("Qwen2", WINDOWS | {"max_window_layers": 1}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3, windows listed": ("Qwen3", WINDOWS | {"layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3, biases": ("Qwen3", {"attention_bias": True}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3-moe, a plain layer": ("Qwen3Moe", EXPERTS | WINDOWS | {"mlp_only_layers": [0]}),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "gemma2, no caps": ("Gemma2", GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", GEMMA | {"num_hidden_layers": 3, "sliding_window_pattern": 2}),
    "phi3": ("Phi3", {}),
    "phi3, a part rotated": ("Phi3", {"partial_rotary_factor": 0.75, "head_dim": 16, "sliding_window": 7}),
    "phi3, longrope": ("Phi3", UP_TO_16 | {"rope_parameters": LONGROPE | {"rope_theta": 500.0}}),
    "olmo2": ("Olmo2", {}),
    "olmo2, a head for all ranks": ("Olmo2", {"num_key_value_heads": 1}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.3,
            "logits_scaling": 4.0,
            "rms_norm_eps": 0.01,
        },
    ),
}

THE_SAME_ON_EVERY_RANK = {
    *("llama", "llama, gelu", "llama, gelu by tanh", "llama, yarn", "llama, dynamic, beyond its context"),
    *("mistral, no window", "qwen2", "qwen3, windows listed", "gemma2, no caps", "phi3"),
}
"""Where they differ from another of their family, nothing is divided."""

NAMES = {"Gemma3": "Gemma3Text"}
"""Of a configuration that is called otherwise than its model."""


def random_model(name: str, changes: dict[str, Any]) -> nn.Module:
    """Whose norms and biases, which transformers makes ones and zeros, are random too."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{NAMES.get(name, name)}Config")(**SHAPE | changes)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_every_family_is_among_them() -> None:
    assert {f"{name}ForCausalLM" for name, _ in VARIANTS.values()} == set(FAMILIES)


def compare(name: str, size: int, start_group: Any, folder: Path) -> None:
    """With dynamic scaling and LongRoPE at the end of the context only, as transformers changes the frequencies while a
    sequence grows."""
    kind, changes = VARIANTS[name]
    model = random_model(kind, changes)
    model.save_pretrained(folder)
    limits = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": LENGTH}
    with start_group(folder, size=size, limits=limits) as (runner, executor):
        whole = compute(runner, executor)
        chunks = ((0, 21), (21, 17), (38, 1), (39, 1))
        parts = [compute(runner, executor, first, count) for first, count in chunks]
    expected = expected_logits(model)
    torch.testing.assert_close(whole, expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(torch.cat(parts), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(
    name: str, start_group: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compare(name, 1, start_group, tmp_path)
    assert "one by one" not in caplog.text, "the layers are no program"


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in THE_SAME_ON_EVERY_RANK])
def test_two_ranks_compute_the_same(name: str, start_group: Any, tmp_path: Path) -> None:
    compare(name, 2, start_group, tmp_path)
