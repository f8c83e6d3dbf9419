"""Converts a GGUF file into a folder in Hugging Face format; ``gguf_families.py`` has what architectures differ in.

The weights are stored as float32: that is what dequantisation yields (scale × integer + minimum), so nothing is
rounded a second time; bfloat16 would drop two thirds of the digits and change the model.

Keys and tensor names follow the GGUF specification (ggml's docs/gguf.md). The tokenizer is built by transformers and
then given the splitting rule that the file names in ``tokenizer.ggml.pre``, which transformers 5.24 does not read:
without it SmolLM2 would not split digits and would tokenize "  12" differently from how it was trained.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig

from ..errors import ConfigurationError
from .cache import Report
from .gguf_families import FAMILIES, OUTSIDE_LAYERS, GGUFFamily, special_token_ids
from .gguf_file import GGUFFile
from .gguf_rope import FREQUENCY_FACTORS

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def convert_gguf(source: Path, folder: Path, report: Report) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer of ``source`` into ``folder``.

    Raises ConfigurationError when the file cannot be read or holds an architecture that is not known.
    """
    report(f"converting {source.name} to safetensors")
    begin = time.monotonic()
    file = GGUFFile(source)
    family = _family(file)
    family.config(file).save_pretrained(folder)
    GenerationConfig(**special_token_ids(file)).save_pretrained(folder)
    _write_tokenizer(file, folder)
    save_file(_weights(file, family), folder / "model.safetensors", metadata={"format": "pt"})
    report(f"converted {source.name} in {time.monotonic() - begin:.1f} s")


def _family(file: GGUFFile) -> GGUFFamily:
    if file.architecture not in FAMILIES:
        known = ", ".join(map(repr, FAMILIES))
        raise ConfigurationError(f"{file.path} has the architecture {file.architecture!r}; known: {known}")
    if file.get(file.own("expert_count")):
        raise ConfigurationError(f"{file.path} uses experts, which are not read from GGUF files")
    return FAMILIES[file.architecture]


def _write_tokenizer(file: GGUFFile, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    if file.require("tokenizer.ggml.model") == "gpt2":
        tokenizer.backend_tokenizer.pre_tokenizer = _pre_tokenizer(file)
    tokenizer.model_max_length = file.count(file.own("context_length"))
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


def _weights(file: GGUFFile, family: GGUFFamily) -> dict[str, NDArray[np.float32]]:
    weights = {}
    for name, values in file.tensors():
        if name == FREQUENCY_FACTORS:  # config.json says what they mean
            continue
        new_name = _hugging_face_name(file, family, name)
        weights[new_name] = np.ascontiguousarray(family.convert(file, name, new_name, values))
    return weights


def _hugging_face_name(file: GGUFFile, family: GGUFFamily, name: str) -> str:
    parts = name.split(".")
    if name in OUTSIDE_LAYERS:
        return OUTSIDE_LAYERS[name]
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in family.in_layer and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{family.in_layer[parts[2]]}.weight"
    raise ConfigurationError(f"{file.path}: tensor {name} is unknown in a {family.title} model")
