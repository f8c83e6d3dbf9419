"""ModelConfig: what config.json says about a Llama-type model, judged once.

Fields that change the computation and are not known here are refused by name: a model that is loaded is computed
right. The keys and their defaults are those of transformers' ``LlamaConfig`` and ``MistralConfig``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from .config_file import ConfigFile
from .packing import Packing, read_packing
from .rope_config import RopeConfig, RopeType, read_rope

MISTRAL = "MistralForCausalLM"
ARCHITECTURES = ("LlamaForCausalLM", MISTRAL)
DTYPES = ("float32", "bfloat16", "float16")
MISTRAL_WINDOW = 4096
"""Of a Mistral whose config.json does not name one."""


class Activation(enum.Enum):
    """What an MLP does to its gate, by its name in config.json."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    GELU = "gelu"


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
    activation: Activation = Activation.SILU
    sliding_window: int | None = None
    """Keys that a query sees, its own among them; None: all."""
    packing: Packing | None = None
    """How the checkpoint packs its matrices; None: it does not."""

    @property
    def longest_context(self) -> int:
        """Tokens of a sequence at the most. Dynamic rotary scaling is for more than the model was trained for."""
        factor = self.rope.factor if self.rope.type is RopeType.DYNAMIC else 1.0
        return int(self.max_position_embeddings * factor)

    @property
    def num_matrix_values(self) -> int:
        """Numbers in the weights of matrix products, the head's among them."""
        heads = 2 * (self.num_query_heads + self.num_kv_heads) * self.head_dim
        layer = heads * self.hidden_size + 3 * self.intermediate_size * self.hidden_size
        return self.num_layers * layer + self.num_table_values

    @property
    def num_table_values(self) -> int:
        """Numbers in the table of the tokens' embeddings."""
        return self.vocab_size * self.hidden_size

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read ``folder``'s config.json and generation_config.json.

        Raises ConfigurationError, in one sentence, for a file that is missing or no JSON and for what is not known.
        """
        source = ConfigFile.read(folder / "config.json")
        architecture = _architecture(source)
        heads = source.positive("num_attention_heads")
        config = cls(
            architecture=architecture,
            vocab_size=source.positive("vocab_size"),
            hidden_size=source.positive("hidden_size"),
            intermediate_size=source.positive("intermediate_size"),
            num_layers=source.positive("num_hidden_layers"),
            num_query_heads=heads,
            num_kv_heads=source.positive("num_key_value_heads", default=heads),
            head_dim=source.positive("head_dim", default=source.positive("hidden_size") // heads),
            rms_norm_eps=float(source.number("rms_norm_eps", default=1e-6, least=0)),
            max_position_embeddings=source.positive("max_position_embeddings"),
            tie_word_embeddings=source.flag("tie_word_embeddings", default=False),
            rope=read_rope(source),
            eos_token_ids=_eos_token_ids(source, folder / "generation_config.json"),
            dtype=_dtype(source),
            activation=_activation(source),
            sliding_window=_sliding_window(source, architecture),
            packing=read_packing(source),
        )
        _check_heads(source, config)
        return config


def _architecture(source: ConfigFile) -> str:
    """Also refuses what would change the computation and is not implemented."""
    for key in ("attention_bias", "mlp_bias"):
        if source.values.get(key):
            source.refuse(f"{key} is {source.values[key]!r}, which is not supported; known: none")
    names = source.values.get("architectures")
    return source.choice("architectures", names[0] if isinstance(names, list) and names else names, ARCHITECTURES)


def _activation(source: ConfigFile) -> Activation:
    name = source.values.get("hidden_act", Activation.SILU.value)
    return Activation(source.choice("hidden_act", name, [member.value for member in Activation]))


def _sliding_window(source: ConfigFile, architecture: str) -> int | None:
    """Of all layers, in Mistral's models; transformers' Llama has none."""
    kinds = source.values.get("layer_types")
    if isinstance(kinds, list) and len(set(kinds)) > 1:
        source.refuse(f"layer_types are {', '.join(sorted(map(str, set(kinds))))}; known: one type for all layers")
    window = source.values.get("sliding_window", MISTRAL_WINDOW if architecture == MISTRAL else None)
    if window is not None and architecture != MISTRAL:
        source.refuse(f"sliding_window is {window!r}, which {architecture} does not have")
    return None if window is None else source.positive("sliding_window", default=window)


def _eos_token_ids(source: ConfigFile, generation_config: Path) -> tuple[int, ...]:
    preferred = ConfigFile.read(generation_config).values.get("eos_token_id") if generation_config.exists() else None
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
