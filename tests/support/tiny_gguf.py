"""A tiny random Llama as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = ["<|end|>", *(bytes([code]).decode() for code in range(33, 127)), "Ġ", "ĠĠ", "Ġa", "12"]
"""A vocabulary whose merges could glue what must not be glued: digits, and spaces before a digit."""
MERGES = ["Ġ Ġ", "Ġ a", "1 2"]


def write_gguf(
    path: Path,
    architecture: str = "llama",
    pre: str = "smollm",
    *,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, NDArray[np.float32]] | None = None,
    packed: tuple[NDArray[np.uint8], gguf.GGMLQuantizationType] | None = None,
) -> LlamaForCausalLM:
    """A tiny random Llama as a GGUF file, rotary dimensions in GGUF's order; and the model itself.

    ``packed``: the bytes of the down projection, ``[32, …]`` for 256 columns, and their type.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        rope_theta=500000.0,
    )
    model = LlamaForCausalLM(config)
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, pre)
    for key, value in (keys or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(key, value)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = tensor.numpy()
        for projection, heads in (("q_proj", 4), ("k_proj", 2)):
            if projection in name:
                values = values.reshape(heads, 2, -1, 32).swapaxes(1, 2).reshape(values.shape)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None
        if packed and "down_proj" in name:
            writer.add_tensor(gguf_name, packed[0], raw_dtype=packed[1])
            continue
        writer.add_tensor(gguf_name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_metadata(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(WORDS)
    writer.add_token_types([3] + [1] * (len(WORDS) - 1))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
