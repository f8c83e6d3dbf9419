"""Converts a GGUF file of the Llama architecture into a folder in Hugging Face format.

The weights are stored as float32: that is what dequantisation yields (scale × integer + minimum), so nothing is
rounded a second time; bfloat16 would drop two thirds of the digits and change the model.

Keys and tensor names follow the GGUF specification (ggml's docs/gguf.md). The tokenizer is built by transformers and
then given the splitting rule that the file names in ``tokenizer.ggml.pre``, which transformers 5.24 does not read:
without it SmolLM2 would not split digits and would tokenize "  12" differently from how it was trained.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

from ..errors import ConfigurationError
from .cache import Report
from .gguf_rope import FREQUENCY_FACTORS, rope_parameters

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
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

_HEADS, _KV_HEADS = "llama.attention.head_count", "llama.attention.head_count_kv"


class GGUFFile:
    """Metadata and tensors of a GGUF file. Raises ConfigurationError when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (ValueError, OSError, IndexError, KeyError) as error:
            size = path.stat().st_size
            reason = f"{error}; it has {size} bytes, is that all of it?"
            raise ConfigurationError(f"{path} cannot be read as a GGUF file: {reason}") from error
        self.tensor_names = frozenset(tensor.name for tensor in self._reader.tensors)

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigurationError(f"{self.path} lacks the key {key}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Raises ConfigurationError for what is no positive number, as a list of one for each layer."""
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{self.path}: {key} is {value!r}, expected a positive whole number")
        return value

    def tensor(self, name: str) -> NDArray[np.float32] | None:
        """The values of a tensor that need not be there."""
        return next((self._values(tensor) for tensor in self._reader.tensors if tensor.name == name), None)

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Each tensor's GGUF name and its values, dequantised to float32, the output dimension first."""
        for tensor in self._reader.tensors:
            yield tensor.name, self._values(tensor)

    def _values(self, tensor: ReaderTensor) -> NDArray[np.float32]:
        try:
            return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ConfigurationError(f"{self.path}: tensor {tensor.name} has the unknown type {kind}") from error


def convert_gguf(source: Path, folder: Path, report: Report) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer of ``source`` into ``folder``.

    Raises ConfigurationError when the file cannot be read or holds another architecture than Llama's.
    """
    report(f"converting {source.name} to safetensors")
    begin = time.monotonic()
    file = GGUFFile(source)
    _write_config(file, folder)
    _write_tokenizer(file, folder)
    save_file(_weights(file), folder / "model.safetensors", metadata={"format": "pt"})
    report(f"converted {source.name} in {time.monotonic() - begin:.1f} s")


def _write_config(file: GGUFFile, folder: Path) -> None:
    _refuse_what_is_not_read(file)
    heads, hidden, special = file.count(_HEADS), file.count("llama.embedding_length"), _special_token_ids(file)
    if hidden % heads:
        raise ConfigurationError(f"{file.path}: llama.embedding_length is {hidden}, not a multiple of {_HEADS} {heads}")
    head_dim = file.count("llama.attention.key_length", hidden // heads)
    if (rotated := file.get("llama.rope.dimension_count", head_dim)) != head_dim:
        raise ConfigurationError(
            f"{file.path}: llama.rope.dimension_count is {rotated}; known: a whole head, {head_dim}"
        )
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=len(file.require("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=file.count("llama.feed_forward_length"),
        num_hidden_layers=file.count("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=file.count(_KV_HEADS, heads),
        head_dim=head_dim,
        max_position_embeddings=file.count("llama.context_length"),
        rms_norm_eps=_shortest(file.require("llama.attention.layer_norm_rms_epsilon")),
        rope_parameters=rope_parameters(file, head_dim, file.tensor(FREQUENCY_FACTORS)),
        tie_word_embeddings="output.weight" not in file.tensor_names,
        **special,
    )
    config.save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)


def _refuse_what_is_not_read(file: GGUFFile) -> None:
    architecture = file.require("general.architecture")
    if architecture != "llama":
        raise ConfigurationError(f"{file.path} has the architecture {architecture!r}; known: 'llama'")
    if file.get("llama.expert_count"):
        raise ConfigurationError(f"{file.path} uses experts, which are not read from GGUF files")


def _special_token_ids(file: GGUFFile) -> dict[str, Any]:
    ends = (file.require("tokenizer.ggml.eos_token_id"), file.get("tokenizer.ggml.eot_token_id"))
    eos = sorted({int(token) for token in ends if token is not None})
    return {
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_tokenizer(file: GGUFFile, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    if file.require("tokenizer.ggml.model") == "gpt2":
        tokenizer.backend_tokenizer.pre_tokenizer = _pre_tokenizer(file)
    tokenizer.model_max_length = file.require("llama.context_length")
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(folder, save_jinja_files=False)


def _pre_tokenizer(file: GGUFFile) -> Any:
    """How text is cut before byte-pair merges, by the name that the file gives."""
    name = file.get("tokenizer.ggml.pre", "default")
    by_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    known = {
        "default": by_regex,
        "gpt-2": by_regex,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_regex]),
        "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"), by_bytes]),
    }
    if name not in known:
        raise ConfigurationError(f"{file.path}: tokenizer.ggml.pre is {name!r}; known: {', '.join(known)}")
    return known[name]


def _weights(file: GGUFFile) -> dict[str, NDArray[np.float32]]:
    heads = file.count(_HEADS)
    heads_by_projection = {"q_proj": heads, "k_proj": file.count(_KV_HEADS, heads)}
    weights = {}
    for name, values in file.tensors():
        if name == FREQUENCY_FACTORS:  # config.json says what they mean
            continue
        new_name = _hugging_face_name(file, name)
        if (num_heads := heads_by_projection.get(new_name.split(".")[-2])) is not None:
            if values.ndim != 2 or values.shape[0] % (2 * num_heads):
                raise ConfigurationError(
                    f"{file.path}: tensor {name} has the shape {list(values.shape)}, whose rows are not those of "
                    f"{num_heads} heads"
                )
            values = _rotate_half_order(values, num_heads)
        weights[new_name] = np.ascontiguousarray(values)
    return weights


def _hugging_face_name(file: GGUFFile, name: str) -> str:
    parts = name.split(".")
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _IN_LAYER and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.weight"
    raise ConfigurationError(f"{file.path}: tensor {name} is unknown in a Llama model")


def _rotate_half_order(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of q and k from GGUF's order (pairs of rotated dimensions side by side) to two halves, as in transformers.

    The inverse of ``permute`` in llama.cpp's convert_hf_to_gguf.py.
    """
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
