"""What the families' config.json have in common; the keys are those of transformers' configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..config import DTYPES, Activation, Biases, ModelConfig, windows_of
from ..config_file import ConfigFile
from ..packing import read_packing
from ..rope_config import read_rope

SLIDING, FULL = "sliding_attention", "full_attention"


def read_decoder(source: ConfigFile, **family: Any) -> ModelConfig:
    """What most families have by these keys, with ``family`` in place of what this one has otherwise.

    All defaults but those of ``family`` are what transformers' LlamaConfig has. Raises ConfigurationError.
    """
    heads = source.positive("num_attention_heads")
    fields: dict[str, Any] = {
        "architecture": architecture(source),
        "vocab_size": source.positive("vocab_size"),
        "hidden_size": source.positive("hidden_size"),
        "intermediate_size": source.positive("intermediate_size"),
        "num_layers": source.positive("num_hidden_layers"),
        "num_query_heads": heads,
        "num_kv_heads": source.positive("num_key_value_heads", default=heads),
        "head_dim": source.positive("head_dim", default=source.positive("hidden_size") // heads),
        "rms_norm_eps": float(source.number("rms_norm_eps", default=1e-6, least=0)),
        "max_position_embeddings": source.positive("max_position_embeddings"),
        "tie_word_embeddings": source.flag("tie_word_embeddings", default=False),
        "eos_token_ids": _eos_token_ids(source),
        "dtype": _dtype(source),
        "packing": read_packing(source),
    }
    # What a family reads by other keys is not read by these: its values there may mean something else.
    for name, read in (("activation", activation), ("rope", read_rope), ("biases", read_biases)):
        fields[name] = family[name] if name in family else read(source)
    config = ModelConfig(**fields | family)
    _check_heads(source, config)
    return config


def architecture(source: ConfigFile) -> object:
    """The first that config.json names."""
    names = source.values.get("architectures")
    return names[0] if isinstance(names, list) and names else names


def activation(source: ConfigFile, key: str = "hidden_act", default: Activation = Activation.SILU) -> Activation:
    name = source.values.get(key, default.value)
    return Activation(source.choice(key, name, [member.value for member in Activation]))


def read_biases(source: ConfigFile) -> Biases:
    attention = source.flag("attention_bias", default=False)
    return Biases(qkv=attention, out=attention, mlp=source.flag("mlp_bias", default=False))


def refuse(source: ConfigFile, *keys: str) -> None:
    """What would change the computation and is not built for this family."""
    for key in keys:
        if source.values.get(key):
            source.refuse(f"{key} is {source.values[key]!r}, which is not supported; known: none")


def refuse_window(source: ConfigFile) -> None:
    """For families without one."""
    window = source.values.get("sliding_window")
    if window is not None:
        source.refuse(f"sliding_window is {window!r}, which {architecture(source)} does not have")
    if any(kind != FULL for kind in layer_kinds(source, lambda layer: False)):
        source.refuse(f"layer_types are not all {FULL}, which {architecture(source)} does not have")


def one_window(source: ConfigFile, default: int | None = None) -> tuple[int | None, ...]:
    """``layer_windows`` of a family whose layers all have the same one, or none."""
    window = source.optional_positive("sliding_window", default)
    kinds = layer_kinds(source, lambda layer: window is not None)
    return windows_of([kind == SLIDING for kind in kinds], window)


def layer_kinds(source: ConfigFile, has_window: Callable[[int], bool]) -> Sequence[str]:
    """``layer_types``, or what follows from the rule where they are not listed."""
    num_layers = source.positive("num_hidden_layers")
    kinds = source.values.get("layer_types")
    if kinds is None:
        return [SLIDING if has_window(layer) else FULL for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        source.refuse(f"layer_types is {kinds!r}, expected a list of {num_layers}, one for each of num_hidden_layers")
    return [source.choice("layer_types", kind, (FULL, SLIDING)) for kind in kinds]


def _eos_token_ids(source: ConfigFile) -> tuple[int, ...]:
    generation = source.path.parent / "generation_config.json"
    preferred = ConfigFile.read(generation).values.get("eos_token_id") if generation.exists() else None
    value = source.values.get("eos_token_id") if preferred is None else preferred
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        source.refuse(f"eos_token_id is {value!r}, expected an id or a list of ids")
    return tuple(ids)


def _dtype(source: ConfigFile) -> str:
    value = source.values.get("dtype") or source.values.get("torch_dtype") or "float32"
    return source.choice("dtype", value, DTYPES)


def _check_heads(source: ConfigFile, config: ModelConfig) -> None:
    if config.num_query_heads % config.num_kv_heads:
        source.refuse(
            f"num_attention_heads is {config.num_query_heads}, which num_key_value_heads {config.num_kv_heads} "
            "does not divide"
        )
    if config.head_dim % 2:
        source.refuse(f"head_dim is {config.head_dim}, expected an even number")
