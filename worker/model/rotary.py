"""The table of rotary positions (Su et al. 2021), with the scalings that stretch it for longer contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .rope_config import RopeConfig, RopeType


def rotary_table(rope: RopeConfig, head_dim: int, max_positions: int) -> Tensor:
    """float32 ``[max_positions, R]``: the cosines of each position's angles, then the sines, of the first R numbers of
    each head, which are rotated.

    One table for all that a server computes: with dynamic scaling and LongRoPE its frequencies are those of a context
    of ``max_positions`` tokens, however long a sequence is, so that K that is cached fits whatever comes after it.
    """
    frequencies = rotary_frequencies(rope, rope.rotated_dim(head_dim), max_positions)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def rotary_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> Tensor:
    """float32 ``[head_dim / 2]``, radians a position, in a context of ``max_positions`` tokens; of ``head_dim`` numbers
    that are rotated."""
    theta = _dynamic_theta(rope, head_dim, max_positions) if rope.type is RopeType.DYNAMIC else rope.theta
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.type is RopeType.LONGROPE:
        is_long = max_positions > rope.original_max_positions
        return frequencies / torch.tensor(rope.long_factors if is_long else rope.short_factors)
    if rope.type is RopeType.LINEAR:
        return frequencies / rope.factor
    if rope.type is RopeType.YARN:
        return _blended(frequencies, rope.factor, _yarn_kept(rope, head_dim))
    if rope.type is RopeType.LLAMA3:
        return _blended(frequencies, rope.factor, _llama3_kept(rope, frequencies))
    return frequencies


def _blended(frequencies: Tensor, factor: float, kept: Tensor) -> Tensor:
    return kept * frequencies + (1 - kept) * frequencies / factor


def _llama3_kept(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended (Llama 3.1, ``apply_scaling``)."""
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    return ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)


def _yarn_kept(rope: RopeConfig, head_dim: int) -> Tensor:
    """The same by dimension instead of turns (Peng et al. 2023, section 3.2)."""
    low, high = (_dimension(rope, head_dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    return 1 - ramp.clamp(0.0, 1.0)


def _dimension(rope: RopeConfig, head_dim: int, turns: float) -> float:
    """Which dimension turns so many times in the original context."""
    return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _dynamic_theta(rope: RopeConfig, head_dim: int, max_positions: int) -> float:
    """NTK-aware scaling by as much as the context is longer than the model's own; below it nothing changes."""
    stretch = max(max_positions / rope.original_max_positions, 1.0)
    return float(rope.theta * (rope.factor * stretch - (rope.factor - 1)) ** (head_dim / (head_dim - 2)))
