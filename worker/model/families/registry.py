"""Which families of models there are. CONTRIBUTING says how to add one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..config import ModelConfig
from ..config_file import ConfigFile
from .common import architecture
from .gemma import read_gemma2, read_gemma3
from .granite import read_granite
from .llama import read_llama
from .mistral import read_mistral, read_mixtral
from .olmo import read_olmo2
from .phi import read_phi3
from .qwen import read_qwen2, read_qwen3, read_qwen3_moe

FAMILIES: dict[str, Callable[[ConfigFile], ModelConfig]] = {
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "MixtralForCausalLM": read_mixtral,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
    "Gemma2ForCausalLM": read_gemma2,
    "Gemma3ForCausalLM": read_gemma3,
    "Phi3ForCausalLM": read_phi3,
    "Olmo2ForCausalLM": read_olmo2,
    "GraniteForCausalLM": read_granite,
}
"""The reader of each, by its name under ``architectures`` in config.json."""


def read_config(folder: Path) -> ModelConfig:
    """See ``ModelConfig.from_folder``."""
    source = ConfigFile.read(folder / "config.json")
    return FAMILIES[source.choice("architectures", architecture(source), FAMILIES)](source)
