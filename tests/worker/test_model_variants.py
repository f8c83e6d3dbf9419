"""What config.json may ask for beside Llama's own: Mistral's window, other activations, other rotary scalings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from prompt_plan import LENGTH, compute, expected_logits
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

SHAPE: dict[str, Any] = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "initializer_range": 0.2}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}

VARIANTS: dict[str, tuple[type[LlamaForCausalLM] | type[MistralForCausalLM], dict[str, Any]]] = {
    "a window shorter than the prompt": (MistralForCausalLM, {"sliding_window": 7}),
    "no window": (MistralForCausalLM, {"sliding_window": None}),
    "gelu": (LlamaForCausalLM, {"hidden_act": "gelu"}),
    "gelu by tanh": (LlamaForCausalLM, {"hidden_act": "gelu_pytorch_tanh"}),
    "yarn": (LlamaForCausalLM, {"rope_parameters": YARN}),
    "dynamic, beyond the model's context": (
        LlamaForCausalLM,
        {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name: str, start_group: Any, tmp_path: Path) -> None:
    """In one prompt, and in a prompt, a chunk and single tokens; with dynamic scaling at the end of the context only,
    as transformers changes the frequencies while a sequence grows."""
    kind, changes = VARIANTS[name]
    config_kind = MistralConfig if kind is MistralForCausalLM else LlamaConfig
    torch.manual_seed(0)
    model = kind(config_kind(**(SHAPE | HEADS | {"max_position_embeddings": 64} | changes))).eval()
    model.save_pretrained(tmp_path)
    limits = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": LENGTH}
    with start_group(tmp_path, limits=limits) as (runner, _):
        whole = compute(runner)
        parts = [compute(runner, first=first, count=count) for first, count in ((0, 21), (21, 17), (38, 1), (39, 1))]
    expected = expected_logits(model)
    torch.testing.assert_close(whole, expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(torch.cat(parts), expected, atol=2e-4, rtol=0)
