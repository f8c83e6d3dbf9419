"""config.json is judged once: what is known is read, what would change the computation is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.worker.errors import ConfigurationError
from octavo.worker.model.config import Activation, ModelConfig
from octavo.worker.model.dtype import choose_dtype
from octavo.worker.model.packing import Packing, PackingMethod
from octavo.worker.model.rope_config import RopeConfig, RopeType

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 7,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def test_defaults_follow_transformers(tmp_path: Path) -> None:
    config = read(tmp_path, num_key_value_heads=None)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config.rope == RopeConfig(10000.0)
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
    ],
    ids=["before transformers 5", "since"],
)
def test_both_spellings_of_rope(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert read(tmp_path, **keys).rope == RopeConfig(5e5, RopeType.LLAMA3, 8.0, 8192)


def test_old_spelling_of_linear_rope(tmp_path: Path) -> None:
    rope = read(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}).rope
    assert rope == RopeConfig(10000.0, RopeType.LINEAR, 2.0)


def test_end_of_sequence_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert read(tmp_path).eos_token_ids == (7,)
    assert read(tmp_path, {"eos_token_id": [7, 9]}).eos_token_ids == (7, 9)
    assert read(tmp_path, {}).eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("keys", "window"), [({"sliding_window": None}, None), ({"sliding_window": 64}, 64), ({}, 4096)]
)
def test_mistrals_sliding_window(tmp_path: Path, keys: dict[str, Any], window: int | None) -> None:
    """One that config.json does not mention is transformers' default."""
    assert read(tmp_path, architectures=["MistralForCausalLM"], **keys).layer_windows == (
        (window, window) if window else ()
    )


@pytest.mark.parametrize("activation", list(Activation))
def test_activations(tmp_path: Path, activation: Activation) -> None:
    assert read(tmp_path, hidden_act=activation.value).activation is activation


@pytest.mark.parametrize(
    ("settings", "packing"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, Packing(PackingMethod.GPTQ, 128, zero_offset=1)),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True, "checkpoint_format": "gptq_v2"},
            Packing(PackingMethod.GPTQ, None, is_permuted=True),
        ),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM", "modules_to_not_convert": ["o"]},
            Packing(PackingMethod.AWQ, 64, plain_modules=("o",)),
        ),
    ],
)
def test_packed_checkpoints(tmp_path: Path, settings: dict[str, Any], packing: Packing) -> None:
    assert read(tmp_path, quantization_config=settings).packing == packing


def test_which_matrices_are_packed() -> None:
    names = [f"model.layers.0.{module}.weight" for module in ("self_attn.q_proj", "mlp.up_proj")] + ["lm_head.weight"]
    packing = Packing(PackingMethod.GPTQ, 128)
    assert [packing.covers(name) for name in names] == [True, True, False]
    assert [replace(packing, plain_modules=("mlp",)).covers(name) for name in names] == [True, False, False]
    assert [replace(packing, packed_modules=("mlp.up_proj",)).covers(name) for name in names] == [False, True, False]
    assert [replace(packing, packs_head=True).covers(name) for name in names] == [True, True, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures is 'GPT2LMHeadModel'; known: LlamaForCausalLM"),
        ({"architectures": None}, "architectures is None"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; known: silu, gelu_pytorch_tanh, gelu"),
        (
            {"rope_scaling": {"rope_type": "ntk"}},
            "rope_type is 'ntk'; known: default, linear, dynamic, yarn, llama3, longrope",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "factor is 0.5, expected at least 1"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"layers of their own \(full_attention\)"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_theta": 1.0}, "rope_theta is 1, expected more than 1"),
        (
            {"rope_scaling": {**LLAMA3, "type": "llama3", "low_freq_factor": 4.0}},
            "high_freq_factor is 4, expected more t",
        ),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a finite number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', expected true or false"),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "modules_to_not_convert": 5}},
            "modules_to_not_convert is 5, expected names",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method is 'fp8'; known: gptq, awq"),
        ({"quantization_config": "gptq"}, "quantization_config is 'gptq', expected a JSON object"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', expected true or false"),
        ({"sliding_window": 4096}, "sliding_window is 4096, which LlamaForCausalLM does not have"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types are not all full_attention, which Llama",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected a number"),
        ({"vocab_size": 0}, "vocab_size is 0, expected a positive whole number"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, which num_key_value_heads 3 does not divide"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(tmp_path, **changes)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json does not exist"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ConfigurationError, match="cannot be read as JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="holds list, expected a JSON object"):
        ModelConfig.from_folder(tmp_path)


def test_dtype(tmp_path: Path) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    stored_as_half = read(tmp_path, torch_dtype="float16")
    assert choose_dtype("auto", stored_as_half, cpu) is torch.float32
    assert choose_dtype("auto", stored_as_half, gpu) is torch.float16
    assert choose_dtype("auto", read(tmp_path), gpu) is torch.bfloat16
    assert choose_dtype("bfloat16", stored_as_half, cpu) is torch.bfloat16
    with pytest.raises(ConfigurationError, match="--dtype is 'int8'; known: auto, float32"):
        choose_dtype("int8", stored_as_half, cpu)


GEMMA3: dict[str, Any] = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "head_dim": 16}


def test_gemma_3_before_and_since_transformers_5(tmp_path: Path) -> None:
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    new = {"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_theta": 2e4}}}
    for keys in (old, new):
        config = read(tmp_path, **GEMMA3 | keys | {"sliding_window_pattern": 2})
        assert config.layer_windows == (8, None)
        assert config.rope_of(0) == RopeConfig(2e4)
        assert config.rope_of(1) == RopeConfig(5e5, RopeType.LINEAR, 8.0)


PHI3: dict[str, Any] = {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5}
MIXTRAL: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            PHI3 | {"rope_scaling": {"type": "su", "short_factor": [1.0] * 4}},
            "long_factor is None, expected a list of 4",
        ),
        (
            PHI3 | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}},
            "short_factor has 3 numbers, expected 4",
        ),
        (PHI3 | {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, expected more than 0 and at most 1"),
        (GEMMA3 | {"layer_types": ["full_attention"]}, "expected a list of 2, one for each of num_hidden_layers"),
        (
            GEMMA3 | {"layer_types": ["full_attention", "linear"]},
            "layer_types is 'linear'; known: full_attention, slid",
        ),
        (GEMMA3 | {"final_logit_softcapping": 0}, "final_logit_softcapping is 0, expected a number above 0"),
        (GEMMA3 | {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1, expected a number above 0"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention is True, which is not supported"),
        (MIXTRAL | {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, expected at most num_local_experts, 4"),
        (MIXTRAL | {"hidden_act": "gelu"}, "hidden_act is 'gelu'; known for experts: silu"),
        ({"architectures": ["OPTForCausalLM"]}, "known: LlamaForCausalLM, .*Gemma3ForCausalLM, .*GraniteForCausalLM"),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(tmp_path, **changes)
