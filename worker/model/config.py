"""ModelConfig: what config.json says about a Llama-type model, judged once.

Fields that change the computation and are not known here are refused by name: a model that is loaded is computed
right. The keys are those of transformers' ``LlamaConfig``, both before its version 5 (``rope_theta``,
``rope_scaling``) and since (``rope_parameters``).
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ConfigurationError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
ACTIVATIONS = ("silu",)
DTYPES = ("float32", "bfloat16", "float16")


class RopeType(enum.Enum):
    """How the rotary frequencies are stretched for longer contexts."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its scaling."""

    theta: float
    type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    """Linear and llama3: by how much the (low) frequencies are divided."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    """llama3: context of the original training; frequencies between the two factors of it are blended."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-type model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    """Context length in tokens that the model was trained for."""
    tie_word_embeddings: bool
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    """Every id that ends an output, by generation_config.json first, config.json else."""
    dtype: str
    """Of the stored weights: float32, bfloat16 or float16."""

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read ``folder``'s config.json and generation_config.json.

        Raises ConfigurationError, in one sentence, for a file that is missing or no JSON and for what is not known.
        """
        source = _Source(folder / "config.json", _read_json(folder / "config.json"))
        _refuse_unknown(source)
        heads = source.positive("num_attention_heads")
        config = cls(
            architecture=source.values["architectures"][0],
            vocab_size=source.positive("vocab_size"),
            hidden_size=source.positive("hidden_size"),
            intermediate_size=source.positive("intermediate_size"),
            num_layers=source.positive("num_hidden_layers"),
            num_query_heads=heads,
            num_kv_heads=source.positive("num_key_value_heads", default=heads),
            head_dim=source.positive("head_dim", default=source.positive("hidden_size") // heads),
            rms_norm_eps=float(source.number("rms_norm_eps", default=1e-6)),
            max_position_embeddings=source.positive("max_position_embeddings"),
            tie_word_embeddings=bool(source.values.get("tie_word_embeddings", False)),
            rope=_rope(source),
            eos_token_ids=_eos_token_ids(source, folder / "generation_config.json"),
            dtype=_dtype(source),
        )
        _check_heads(source, config)
        return config


@dataclass(frozen=True, slots=True)
class _Source:
    """The parsed file and its path, so that every complaint names both."""

    path: Path
    values: dict[str, Any]

    def refuse(self, what: str) -> NoReturn:
        raise ConfigurationError(f"{self.path}: {what}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(f"{key} is {value!r}, expected a number" if value is not None else f"{key} is missing")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not isinstance(value, int) or value < 1:
            self.refuse(f"{key} is {value!r}, expected a positive whole number")
        return value

    def choice(self, key: str, value: object, known: Iterable[str]) -> str:
        known = tuple(known)
        if value not in known:
            self.refuse(f"{key} is {value!r}; known: {', '.join(known)}")
        return str(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} holds {type(values).__name__}, expected a JSON object")
    return values


def _refuse_unknown(source: _Source) -> None:
    """Everything that would change the computation and is not implemented."""
    names = source.values.get("architectures")
    source.choice("architectures", names[0] if isinstance(names, list) and names else names, ARCHITECTURES)
    source.choice("hidden_act", source.values.get("hidden_act", "silu"), ACTIVATIONS)
    for key in ("attention_bias", "mlp_bias", "quantization_config", "sliding_window"):
        value = source.values.get(key)
        if value:
            shown = value.get("quant_method", value) if isinstance(value, dict) else value
            source.refuse(f"{key} is {shown!r}, which is not supported; known: none")
    partial = source.values.get("partial_rotary_factor", 1.0)
    if partial not in (None, 1.0):
        source.refuse(f"partial_rotary_factor is {partial!r}; known: 1.0")


def _rope(source: _Source) -> RopeConfig:
    values: dict[str, Any] = source.values.get("rope_parameters") or source.values.get("rope_scaling") or {}
    rope = _Source(source.path, {"rope_theta": source.values.get("rope_theta"), **values})
    name = values.get("rope_type", values.get("type", "default"))
    kind = RopeType(rope.choice("rope_type", name, [member.value for member in RopeType]))
    theta = float(rope.number("rope_theta", default=10000.0))
    if kind is RopeType.DEFAULT:
        return RopeConfig(theta)
    if kind is RopeType.LINEAR:
        return RopeConfig(theta, kind, float(rope.number("factor")))
    return RopeConfig(
        theta,
        kind,
        float(rope.number("factor")),
        float(rope.number("low_freq_factor")),
        float(rope.number("high_freq_factor")),
        rope.positive("original_max_position_embeddings"),
    )


def _eos_token_ids(source: _Source, generation_config: Path) -> tuple[int, ...]:
    preferred = _read_json(generation_config).get("eos_token_id") if generation_config.exists() else None
    value = source.values.get("eos_token_id") if preferred is None else preferred
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        source.refuse(f"eos_token_id is {value!r}, expected an id or a list of ids")
    return tuple(ids)


def _dtype(source: _Source) -> str:
    value = source.values.get("dtype") or source.values.get("torch_dtype") or "float32"
    return source.choice("dtype", value, DTYPES)


def _check_heads(source: _Source, config: ModelConfig) -> None:
    if config.num_query_heads % config.num_kv_heads:
        source.refuse(
            f"num_attention_heads is {config.num_query_heads}, which num_key_value_heads {config.num_kv_heads} "
            "does not divide"
        )
    if config.head_dim % 2:
        source.refuse(f"head_dim is {config.head_dim}, expected an even number")
