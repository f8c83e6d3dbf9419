"""RopeConfig: what config.json says about rotary positions, both before transformers 5 and since."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from .config_file import ConfigFile


class RopeType(enum.Enum):
    """How the rotary frequencies are stretched for longer contexts."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its scaling; ``model/rotary.py`` has the formulas."""

    theta: float
    type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    """By how much the context is stretched."""
    original_max_positions: int = 8192
    """Context of the original training. Not for default and linear."""
    low_freq_factor: float = 1.0
    """llama3: frequencies that turn fewer times than this in the original context are divided by the factor."""
    high_freq_factor: float = 4.0
    """llama3: those that turn more times are kept."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more times than this in the original context are kept."""
    beta_slow: float = 1.0
    """yarn: those that turn fewer times are divided by the factor."""
    truncate: bool = True
    """yarn: the two bounds are rounded outwards to whole dimensions."""
    attention_factor: float = 1.0
    """yarn: of cosines and sines."""


def read_rope(file: ConfigFile) -> RopeConfig:
    """Keys and defaults are those of transformers 5.24; per-layer parameters are refused."""
    rope = file.within("rope_scaling", "rope_parameters")
    nested = [key for key, value in rope.values.items() if isinstance(value, dict)]
    if nested:
        file.refuse(f"rotary parameters of layers of their own ({', '.join(nested)}) are not supported")
    values = {"rope_theta": file.values.get("rope_theta"), **rope.values}
    values.setdefault("partial_rotary_factor", file.values.get("partial_rotary_factor"))
    if (original := file.values.get("original_max_position_embeddings")) is not None:
        values["original_max_position_embeddings"] = original
    return _read(ConfigFile(file.path, values), file)


def _read(rope: ConfigFile, file: ConfigFile) -> RopeConfig:
    if rope.number("partial_rotary_factor", default=1.0) != 1.0:
        rope.refuse(f"partial_rotary_factor is {rope.values['partial_rotary_factor']!r}; known: 1.0")
    name = rope.values.get("rope_type", rope.values.get("type", "default"))
    kind = RopeType(rope.choice("rope_type", name, [member.value for member in RopeType]))
    theta = float(rope.number("rope_theta", default=10000.0))
    if theta <= 1:
        rope.refuse(f"rope_theta is {theta:g}, expected more than 1")
    trained = file.values.get("max_position_embeddings")
    if kind is RopeType.DEFAULT:
        return RopeConfig(theta)
    if kind is RopeType.YARN:
        return _yarn(theta, rope, file)
    factor = float(rope.number("factor", least=1.0))
    if kind is RopeType.LINEAR:
        return RopeConfig(theta, kind, factor)
    if kind is RopeType.DYNAMIC:  # the context that is stretched is the model's whole one
        return RopeConfig(theta, kind, factor, file.positive("max_position_embeddings"))
    original = rope.positive("original_max_position_embeddings", default=trained)
    low, high = float(rope.number("low_freq_factor")), float(rope.number("high_freq_factor"))
    if high <= low:
        rope.refuse(f"high_freq_factor is {high:g}, expected more than low_freq_factor, {low:g}")
    return RopeConfig(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)


def _yarn(theta: float, rope: ConfigFile, file: ConfigFile) -> RopeConfig:
    trained = file.positive("max_position_embeddings")
    original = rope.positive("original_max_position_embeddings", default=trained)
    factor = float(rope.number("factor", default=trained / original, least=1.0))
    return RopeConfig(
        theta,
        RopeType.YARN,
        factor,
        original,
        beta_fast=float(rope.number("beta_fast", default=32.0) or 32.0),
        beta_slow=float(rope.number("beta_slow", default=1.0) or 1.0),
        truncate=rope.flag("truncate", default=True),
        attention_factor=float(rope.number("attention_factor", default=_attention_factor(rope, factor))),
    )


def _attention_factor(rope: ConfigFile, factor: float) -> float:
    """The temperature of attention of Peng et al. 2023, section 3.4; DeepSeek's models scale it twice."""
    above = float(rope.number("mscale", default=0.0))
    below = float(rope.number("mscale_all_dim", default=0.0))
    if above and below:
        return _temperature(factor, above) / _temperature(factor, below)
    return _temperature(factor, 1.0)


def _temperature(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
