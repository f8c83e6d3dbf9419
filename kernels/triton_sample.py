"""Sampling on GPUs: torch filters, one Triton kernel draws. The numbers are those of ``noise.py``."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import noise
from .reference import filter_top_k, filter_top_p

PART = 8192
"""Tokens of a row that one program looks at."""

GAMMA = tl.constexpr(noise.GAMMA)
MIX_1 = tl.constexpr(noise.MIX_1)
MIX_2 = tl.constexpr(noise.MIX_2)


@triton.jit
def mix(x):
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def draw_kernel(
    logits,
    temperatures,
    seeds,
    branches,
    positions,
    best,
    winner,
    logits_stride,
    vocab_size,
    num_parts,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, parts): the largest perturbed logit of a part of a row, and its token."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row).to(tl.float64)
    greedy = temperature <= 0
    temperature = tl.where(greedy, 1.0, temperature)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    place = (tl.load(branches + row).to(tl.uint64) << 32) | tl.load(positions + row).to(tl.uint64)
    key = mix(mix(seed + GAMMA) + place)
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float64)
    token_of = tl.zeros([BLOCK], tl.int32) + part * PART
    for start in range(part * PART, tl.minimum((part + 1) * PART, vocab_size), BLOCK):
        token = start + lane
        inside = token < vocab_size
        logit = tl.load(logits + row * logits_stride + token, mask=inside, other=float("-inf")).to(tl.float64)
        bits = mix(key + token.to(tl.uint64) * GAMMA)
        uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
        perturbed = logit / temperature - tl.where(greedy, 0.0, tl.log(-tl.log(uniform)))
        better = perturbed > largest
        largest = tl.where(better, perturbed, largest)
        token_of = tl.where(better, token, token_of)
    top = tl.max(largest, axis=0)
    # Of equals, the lowest token.
    token = tl.min(tl.where(largest == top, token_of, 2147483647), axis=0)
    tl.store(best + row * num_parts + part, top)
    tl.store(winner + row * num_parts + part, token)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    branches: Tensor,
    positions: Tensor,
) -> Tensor:
    """See ``reference.sample``."""
    num_rows, vocab_size = logits.shape
    if bool(((top_k < vocab_size) | (top_p < 1.0)).any()):
        logits = _filter(logits, temperature, top_k, top_p)
    num_parts = triton.cdiv(vocab_size, PART)
    best = torch.empty((num_rows, num_parts), dtype=torch.float64, device=logits.device)
    winner = torch.empty((num_rows, num_parts), dtype=torch.int64, device=logits.device)
    draw_kernel[(num_rows, num_parts)](
        logits,
        temperature,
        seeds,
        branches,
        positions,
        best,
        winner,
        logits.stride(0),
        vocab_size,
        num_parts,
        PART=PART,
        BLOCK=1024,
    )
    return winner.gather(1, best.argmax(dim=1, keepdim=True)).squeeze(1)


def _filter(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The logits, with what top_k and top_p drop at -inf. Rows without a temperature are left alone."""
    drawn = temperature > 0
    scaled = logits.double() / torch.where(drawn, temperature, 1.0)[:, None].double()
    kept = filter_top_p(filter_top_k(scaled, top_k), top_p)
    return logits.masked_fill((kept == -torch.inf) & drawn[:, None], -torch.inf)
