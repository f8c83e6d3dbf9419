"""ModelConfig: how a transformer is built, as its config.json says; one description for every family.

The folder ``families`` has a reader for each, which refuses by name what would change the computation and is not known
here: a model that is loaded is computed right. Nothing here needs torch.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .packing import Packing
from .rope_config import RopeConfig, RopeType

DTYPES = ("float32", "bfloat16", "float16")


class Activation(enum.Enum):
    """What an MLP does to its gate, by its name in config.json."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    GELU = "gelu"


class NormPlacement(enum.Enum):
    """Where a layer's attention and MLP are normed."""

    BEFORE = "before"
    """Of what they are given: Llama and most others."""
    AFTER = "after"
    """Of what they give: OLMo 2."""
    AROUND = "around"
    """Both: Gemma."""


class QueryKeyNorm(enum.Enum):
    """What the norms of queries and keys span, which come before the rotary positions."""

    HEADS = "heads"
    """Each head by itself, with one weight: Qwen3, Gemma 3."""
    PROJECTION = "projection"
    """All heads together: OLMo 2."""


@dataclass(frozen=True, slots=True)
class Biases:
    """Which products have a bias."""

    qkv: bool = False
    out: bool = False
    """Of attention."""
    mlp: bool = False


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a checkpoint calls the parts of a mixture."""

    block: str
    """The mixture within its transformer layer; the router is its ``gate``."""
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture's sizes, and how it chooses."""

    names: ExpertNames
    intermediate_size: int
    """Of one expert."""
    num_experts: int
    num_chosen: int
    """Experts of each token."""
    renormalise: bool
    """Whether the weights of a token's experts add up to 1."""
    dense_layers: frozenset[int] = frozenset()
    """Those with a plain MLP in the mixture's place."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of attention and gated MLPs: its shape, and where families differ."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of plain MLPs."""
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
    layer_windows: tuple[int | None, ...] = ()
    """Of each layer, how many keys a query sees, its own among them; None: all. Empty: all layers see all."""
    window_rope: RopeConfig | None = None
    """Of layers with a window; None: as all others."""
    norms: NormPlacement = NormPlacement.BEFORE
    norm_offset: float = 0.0
    """Added to every norm's weight: Gemma stores how far they are from 1."""
    query_key_norm: QueryKeyNorm | None = None
    biases: Biases = Biases()
    fused_projections: bool = False
    """The checkpoint has q, k and v in one matrix, gate and up in another."""
    attention_scale: float | None = None
    """Of queries times keys; None: 1 / sqrt(head_dim)."""
    attention_soft_cap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    experts: ExpertsConfig | None = None
    packing: Packing | None = None
    """How the checkpoint packs its matrices; None: it does not."""

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read ``folder``'s config.json and generation_config.json.

        Raises ConfigurationError, in one sentence, for a file that is missing or no JSON and for what is not known.
        """
        from .families.registry import read_config  # whose readers make what is defined here

        return read_config(folder)

    def window(self, layer: int) -> int | None:
        """Keys that a query of this layer sees at the most; None: all."""
        return self.layer_windows[layer] if self.layer_windows else None

    def rope_of(self, layer: int) -> RopeConfig:
        return self.rope if self.window_rope is None or self.window(layer) is None else self.window_rope

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def longest_context(self) -> int:
        """Tokens of a sequence at the most. Dynamic rotary scaling is for more than the model was trained for."""
        factor = self.rope.factor if self.rope.type is RopeType.DYNAMIC else 1.0
        return int(self.max_position_embeddings * factor)

    @property
    def num_matrix_values(self) -> int:
        """Numbers in the weights of matrix products, the head's among them."""
        heads = 2 * (self.num_query_heads + self.num_kv_heads) * self.head_dim
        inner = sum(self._inner_columns(layer) for layer in range(self.num_layers))
        return (self.num_layers * heads + 3 * inner) * self.hidden_size + self.num_table_values

    def _inner_columns(self, layer: int) -> int:
        if self.experts is None or not self.has_experts(layer):
            return self.intermediate_size
        return self.experts.num_experts * self.experts.intermediate_size

    @property
    def num_table_values(self) -> int:
        """Numbers in the table of the tokens' embeddings."""
        return self.vocab_size * self.hidden_size


def windows_of(kinds: Sequence[bool], window: int | None) -> tuple[int | None, ...]:
    """``layer_windows`` of which layers have a window, and its length; empty where none has."""
    return tuple(window if kind else None for kind in kinds) if window is not None and any(kinds) else ()
