"""What GGUF's architectures differ in: their configurations, the names of their tensors, and how values are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig

from ..errors import ConfigurationError
from .gguf_file import GGUFFile
from .gguf_rope import FREQUENCY_FACTORS, rope_parameters

Values = NDArray[np.float32]

OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER = _LLAMA_LAYER | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_GEMMA3_PATTERN = 6
"""Every sixth layer sees all keys; the files do not say so."""
_GEMMA3_27B_LAYERS = 62
"""The one size whose queries are scaled by the hidden size over the heads instead of by a head's size."""


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """One of GGUF's architectures."""

    title: str
    """For people."""
    in_layer: Mapping[str, str]
    """Names of a layer's tensors here and in transformers."""
    config: Callable[[GGUFFile], PreTrainedConfig]
    """Raises ConfigurationError for what cannot be."""
    convert: Callable[[GGUFFile, str, str, Values], Values]
    """Of the file, a tensor's name here and in transformers, and its values: those that transformers has."""


def special_token_ids(file: GGUFFile) -> dict[str, Any]:
    ends = (file.require("tokenizer.ggml.eos_token_id"), file.get("tokenizer.ggml.eot_token_id"))
    eos = sorted({int(token) for token in ends if token is not None})
    return {
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }


def _shape(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """What both have by the same keys."""
    hidden, heads_key = file.count(file.own("embedding_length")), file.own("attention.head_count")
    heads = file.count(heads_key)
    if file.get(file.own("attention.key_length")) is None and hidden % heads:
        raise ConfigurationError(
            f"{file.path}: {file.own('embedding_length')} is {hidden}, not a multiple of {heads_key} {heads}"
        )
    return {
        "architectures": [architecture],
        "dtype": "float32",
        "vocab_size": len(file.require("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": file.count(file.own("feed_forward_length")),
        "num_hidden_layers": file.count(file.own("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": file.count(file.own("attention.head_count_kv"), heads),
        "head_dim": _head_dim(file, hidden // heads),
        "max_position_embeddings": file.count(file.own("context_length")),
        "rms_norm_eps": file.number(file.own("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensor_names,
        **special_token_ids(file),
    }


def _head_dim(file: GGUFFile, default: int) -> int:
    head_dim = file.count(file.own("attention.key_length"), default)
    rotated_key = file.own("rope.dimension_count")
    if (rotated := file.get(rotated_key, head_dim)) != head_dim:
        raise ConfigurationError(f"{file.path}: {rotated_key} is {rotated}; known: a whole head, {head_dim}")
    return head_dim


def _llama_config(file: GGUFFile) -> LlamaConfig:
    shape = _shape(file, "LlamaForCausalLM")
    rope = rope_parameters(file, shape["head_dim"], file.tensor(FREQUENCY_FACTORS))
    return LlamaConfig(**shape, rope_parameters=rope)


def _convert_llama(file: GGUFFile, name: str, new_name: str, values: Values) -> Values:
    """Rows of q and k from GGUF's order (pairs of rotated dimensions side by side) to two halves, as in transformers.

    The inverse of ``permute`` in llama.cpp's convert_hf_to_gguf.py.
    """
    heads = file.count(file.own("attention.head_count"))
    heads_of = {"q_proj": heads, "k_proj": file.count(file.own("attention.head_count_kv"), heads)}
    num_heads = heads_of.get(new_name.split(".")[-2])
    if num_heads is None:
        return values
    if values.ndim != 2 or values.shape[0] % (2 * num_heads):
        raise ConfigurationError(
            f"{file.path}: tensor {name} has the shape {list(values.shape)}, whose rows are not those of "
            f"{num_heads} heads"
        )
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, values.shape[1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _gemma3_config(file: GGUFFile) -> Gemma3TextConfig:
    shape = _shape(file, "Gemma3ForCausalLM")
    is_27b = shape["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    scaled_by = shape["hidden_size"] // shape["num_attention_heads"] if is_27b else shape["head_dim"]
    return Gemma3TextConfig(
        **shape,
        query_pre_attn_scalar=scaled_by,
        sliding_window=file.count(file.own("attention.sliding_window")),
        sliding_window_pattern=_GEMMA3_PATTERN,
        rope_parameters=_gemma3_rope(file),
    )


def _gemma3_rope(file: GGUFFile) -> dict[str, Any]:
    """Of both kinds of layers; a scaling is for those that see all keys."""
    kind = file.get(file.own("rope.scaling.type"), "none")
    if kind not in ("none", "linear"):
        raise ConfigurationError(f"{file.path}: {file.own('rope.scaling.type')} is {kind!r}; known: none, linear")
    scaling: dict[str, Any] = {"rope_type": "default"}
    if kind == "linear":
        scaling = {"rope_type": "linear", "factor": file.number(file.own("rope.scaling.factor"))}
    theta = file.number(file.own("rope.freq_base"), 1e6)
    window_theta = file.number(file.own("rope.freq_base_swa"), 1e4)
    return {
        "full_attention": {"rope_theta": theta, **scaling},
        "sliding_attention": {"rope_theta": window_theta, "rope_type": "default"},
    }


def _convert_gemma3(file: GGUFFile, name: str, new_name: str, values: Values) -> Values:
    """Norms' weights are stored whole here, less 1 in transformers."""
    return values - np.float32(1) if name.endswith("norm.weight") else values


FAMILIES: Mapping[str, GGUFFamily] = {
    "llama": GGUFFamily("Llama", _LLAMA_LAYER, _llama_config, _convert_llama),
    "gemma3": GGUFFamily("Gemma 3", _GEMMA3_LAYER, _gemma3_config, _convert_gemma3),
}
"""By llama.cpp's names for them."""
