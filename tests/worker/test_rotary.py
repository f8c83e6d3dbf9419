"""Rotary positions are those of transformers, for every scaling, from the same config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.worker.model.config import ModelConfig
from octavo.worker.model.rotary import rotary_table

CONTEXT = 1024
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 512},
    "llama3 of the whole context": LLAMA3,
    "yarn": YARN,
    "yarn, factor from the contexts": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn, attention_factor": YARN | {"attention_factor": 0.8},
    "yarn, betas": YARN | {"beta_fast": 16, "beta_slow": 2},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, bounds in one place": YARN | {"beta_fast": 2, "beta_slow": 2, "truncate": False},
}


def tables(folder: Path, scaling: dict[str, Any], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and transformers' of ``length`` positions, ``[length, head_dim]``."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": 5000.0, **scaling},
    )
    config.save_pretrained(folder)
    ours = ModelConfig.from_folder(folder)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    half = ours.head_dim // 2
    return rotary_table(ours.rope, ours.head_dim, length), torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("name", SCALINGS)
def test_the_table_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    ours, expected = tables(tmp_path, SCALINGS[name], CONTEXT)
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=0)


def test_dynamic_frequencies_are_those_of_the_whole_context(tmp_path: Path) -> None:
    """As transformers has them when a sequence has got so long; here they hold for shorter ones too."""
    ours, expected = tables(tmp_path, SCALINGS["dynamic"], 2 * CONTEXT)
    torch.testing.assert_close(ours, expected, atol=4e-4, rtol=0)
    default, _ = tables(tmp_path, SCALINGS["default"], 2 * CONTEXT)
    assert not torch.allclose(ours, default, atol=0.1)


@pytest.mark.parametrize(("name", "longest"), [("dynamic", 2 * CONTEXT), ("linear", CONTEXT), ("yarn", CONTEXT)])
def test_only_dynamic_scaling_goes_beyond_the_models_context(name: str, longest: int, tmp_path: Path) -> None:
    tables(tmp_path, SCALINGS[name], 8)
    assert ModelConfig.from_folder(tmp_path).longest_context == longest
