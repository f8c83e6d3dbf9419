"""What a GGUF file of the Llama architecture says about rotary positions, in transformers' words."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from ..model.rope_config import RopeConfig, RopeType
from ..model.rotary import rotary_frequencies

FREQUENCY_FACTORS = "rope_freqs.weight"
"""A tensor by which the frequencies are divided: how llama.cpp stores the scaling of Llama 3.1 and later."""

_SCALING = "llama.rope.scaling"

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA3_FACTORS = (8.0, 32.0)
"""Of Llama 3.1 and 3.3, and of 3.2."""


class Keys(Protocol):
    """The metadata of a file."""

    path: Any

    def get(self, key: str, default: Any = None) -> Any: ...

    def require(self, key: str) -> Any: ...


def rope_parameters(file: Keys, head_dim: int, frequency_factors: NDArray[np.float32] | None) -> dict[str, Any]:
    """``rope_parameters`` of config.json. A scaling factor without a type is linear, as in llama.cpp.

    Raises ConfigurationError for a scaling that is not known.
    """
    theta = {"rope_theta": file.get("llama.rope.freq_base", 10000.0)}
    if frequency_factors is not None:
        return theta | _llama3(file, theta["rope_theta"], head_dim, frequency_factors)
    factor = file.get(f"{_SCALING}.factor", file.get("llama.rope.scale_linear"))
    kind = file.get(f"{_SCALING}.type", "linear" if factor else "none")
    if kind == "none":
        return theta | {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise ConfigurationError(f"{file.path}: {_SCALING}.type is {kind!r}; known: none, linear, yarn")
    if not factor:
        raise ConfigurationError(f"{file.path} lacks the key {_SCALING}.factor")
    scaled = theta | {"rope_type": kind, "factor": factor}
    return scaled | _yarn(file, factor) if kind == "yarn" else scaled


def _yarn(file: Keys, factor: float) -> dict[str, Any]:
    """The temperature of attention is multiplied in llama.cpp, and given whole in config.json."""
    temperature = 0.1 * math.log(max(factor, 1.0)) + 1.0
    attention = file.get(f"{_SCALING}.attn_factor", file.get(f"{_SCALING}.yarn_attn_factor", 1.0))
    original = file.get(f"{_SCALING}.original_context_length")
    return {
        "original_max_position_embeddings": original or file.require("llama.context_length"),
        "beta_fast": file.get(f"{_SCALING}.yarn_beta_fast", 32.0),
        "beta_slow": file.get(f"{_SCALING}.yarn_beta_slow", 1.0),
        "attention_factor": float(attention * temperature),
    }


def _llama3(file: Keys, theta: float, head_dim: int, factors: NDArray[np.float32]) -> dict[str, Any]:
    """The one of Llama 3's scalings that has these factors."""
    plain = rotary_frequencies(RopeConfig(theta), head_dim, 1)
    for factor in _LLAMA3_FACTORS:
        rope = RopeConfig(
            theta,
            RopeType.LLAMA3,
            factor,
            int(_LLAMA3["original_max_position_embeddings"]),
            low_freq_factor=_LLAMA3["low_freq_factor"],
            high_freq_factor=_LLAMA3["high_freq_factor"],
        )
        expected = (plain / rotary_frequencies(rope, head_dim, 1)).numpy()
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-3):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise ConfigurationError(
        f"{file.path}: {FREQUENCY_FACTORS} holds factors from {factors.min():g} to {factors.max():g}, which are not "
        f"those of Llama 3 with a factor of {' or '.join(f'{factor:g}' for factor in _LLAMA3_FACTORS)}"
    )
