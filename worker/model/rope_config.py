"""RopeConfig: what config.json says about rotary positions, both before transformers 5 and since."""

from __future__ import annotations

import dataclasses
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
    LONGROPE = "longrope"


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
    """yarn and longrope: of cosines and sines."""
    rotated_share: float = 1.0
    """Of each head's numbers, how many of the first are rotated."""
    short_factors: tuple[float, ...] = ()
    """longrope: by what each frequency is divided in contexts up to the original one."""
    long_factors: tuple[float, ...] = ()
    """longrope: in longer ones."""

    def rotated_dim(self, head_dim: int) -> int:
        """Numbers of each head that are rotated."""
        return int(head_dim * self.rotated_share)


def read_rope(file: ConfigFile, *, may_be_partial: bool = False, longrope_names: tuple[str, ...] = ()) -> RopeConfig:
    """Keys and defaults are those of transformers 5.24.

    ``may_be_partial``: the family can rotate a part of each head. ``longrope_names``: what it calls LongRoPE besides.
    """
    rope = file.within("rope_scaling", "rope_parameters")
    nested = [key for key, value in rope.values.items() if isinstance(value, dict)]
    if nested:
        file.refuse(f"rotary parameters of layers of their own ({', '.join(nested)}) are not supported")
    values = {"rope_theta": file.values.get("rope_theta"), **rope.values}
    values.setdefault("partial_rotary_factor", file.values.get("partial_rotary_factor"))
    if (original := file.values.get("original_max_position_embeddings")) is not None:
        values["original_max_position_embeddings"] = original
    values["rope_type"] = values.get("rope_type", values.get("type", RopeType.DEFAULT.value))
    if values["rope_type"] in longrope_names:
        values["rope_type"] = RopeType.LONGROPE.value
    merged = ConfigFile(file.path, values)
    return dataclasses.replace(_read(merged, file), rotated_share=_rotated_share(merged, may_be_partial))


def _rotated_share(rope: ConfigFile, may_be_partial: bool) -> float:
    share = float(rope.number("partial_rotary_factor", default=1.0))
    if not may_be_partial and share != 1.0:
        rope.refuse(f"partial_rotary_factor is {rope.values['partial_rotary_factor']!r}; known: 1.0")
    if not 0 < share <= 1:
        rope.refuse(f"partial_rotary_factor is {share:g}, expected more than 0 and at most 1")
    return share


def _read(rope: ConfigFile, file: ConfigFile) -> RopeConfig:
    kind = RopeType(rope.choice("rope_type", rope.values["rope_type"], [member.value for member in RopeType]))
    theta = float(rope.number("rope_theta", default=10000.0))
    if theta <= 1:
        rope.refuse(f"rope_theta is {theta:g}, expected more than 1")
    if kind is RopeType.DEFAULT:
        return RopeConfig(theta)
    if kind is RopeType.YARN:
        return _yarn(theta, rope, file)
    if kind is RopeType.LONGROPE:
        return _longrope(theta, rope, file)
    factor = float(rope.number("factor", least=1.0))
    if kind is RopeType.LINEAR:
        return RopeConfig(theta, kind, factor)
    if kind is RopeType.DYNAMIC:  # the context that is stretched is the model's whole one
        return RopeConfig(theta, kind, factor, file.positive("max_position_embeddings"))
    return _llama3(theta, factor, rope, file)


def _llama3(theta: float, factor: float, rope: ConfigFile, file: ConfigFile) -> RopeConfig:
    trained = file.values.get("max_position_embeddings")
    original = rope.positive("original_max_position_embeddings", default=trained)
    low, high = float(rope.number("low_freq_factor")), float(rope.number("high_freq_factor"))
    if high <= low:
        rope.refuse(f"high_freq_factor is {high:g}, expected more than low_freq_factor, {low:g}")
    return RopeConfig(theta, RopeType.LLAMA3, factor, original, low_freq_factor=low, high_freq_factor=high)


def _longrope(theta: float, rope: ConfigFile, file: ConfigFile) -> RopeConfig:
    """Ding et al. 2024. The default of attention's factor is theirs, section 3.3."""
    trained = file.positive("max_position_embeddings")
    original = rope.positive("original_max_position_embeddings", default=trained)
    factor = float(rope.number("factor", default=trained / original))
    head_dim = file.positive("head_dim", default=file.positive("hidden_size") // file.positive("num_attention_heads"))
    num_pairs = int(head_dim * rope.number("partial_rotary_factor", default=1.0)) // 2
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        theta,
        RopeType.LONGROPE,
        factor,
        original,
        attention_factor=float(rope.number("attention_factor", default=default)),
        short_factors=_factors("short_factor", rope, num_pairs),
        long_factors=_factors("long_factor", rope, num_pairs),
    )


def _factors(key: str, rope: ConfigFile, num_pairs: int) -> tuple[float, ...]:
    """One for each frequency."""
    values = rope.values.get(key)
    if not isinstance(values, list) or not all(isinstance(value, int | float) and value > 0 for value in values):
        rope.refuse(f"{key} is {values!r}, expected a list of {num_pairs} numbers above 0")
    if len(values) != num_pairs:
        rope.refuse(f"{key} has {len(values)} numbers, expected {num_pairs}, one for each pair that is rotated")
    return tuple(map(float, values))


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
