"""The random numbers of sampling: a hash of (seed, branch, position, token) and nothing else.

A row's key is ``mix(mix(seed + GAMMA) + (branch << 32 | position))``; token v's 64 random bits are
``mix(key + v * GAMMA)``, that is the SplitMix64 generator started at the key (Steele, Lea, Flood 2014, "Fast
splittable pseudorandom number generators"; constants of its mix13 variant). The uniform number is
``(bits >> 12 + 0.5) / 2^52``: exact in float64 on every machine, never 0 or 1. Noise is float64, because the largest
of 24-bit uniforms would cut off draws rarer than one in 16 million.

torch has no unsigned 64-bit arithmetic: int64 wraps around alike, and a logical shift is a masked arithmetic one.
"""

from __future__ import annotations

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def signed(bits: int) -> int:
    """The signed 64-bit number with the same bits."""
    return bits - (1 << 64) if bits >> 63 else bits


def shift_right(x: Tensor, count: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of 64 bits in which every input bit reaches every output bit."""
    x = (x ^ shift_right(x, 30)) * signed(MIX_1)
    x = (x ^ shift_right(x, 27)) * signed(MIX_2)
    return x ^ shift_right(x, 31)


def row_keys(seeds: Tensor, branches: Tensor, positions: Tensor) -> Tensor:
    """int64 ``[R]``: where each row's stream of random bits begins."""
    return mix(mix(seeds + signed(GAMMA)) + ((branches.long() << 32) | positions.long()))


def uniform_noise(seeds: Tensor, branches: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """float64 ``[R, V]`` in (0, 1)."""
    tokens = torch.arange(vocab_size, device=seeds.device)
    bits = mix(row_keys(seeds, branches, positions)[:, None] + tokens * signed(GAMMA))
    return (shift_right(bits, 12).double() + 0.5) * 2.0**-52


def gumbel_noise(seeds: Tensor, branches: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """float64 ``[R, V]``: ``-log(-log(u))``."""
    return -(-uniform_noise(seeds, branches, positions, vocab_size).log()).log()
