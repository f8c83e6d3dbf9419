"""Sampling on GPUs. The numbers are those of ``noise.py``; nothing is asked of the device, so that graphs can hold it.

1. ``penalise_kernel``, ``bias_kernel``, ``ban_kernel``, ``mask_kernel``: in a copy of the logits, where any row has
   such wishes.
2. ``threshold_kernel`` (triton_sample_filter.py), where any row filters: the smallest logit that each row keeps.
3. ``draw_kernel``: of each part of a row the best perturbed logit.
4. ``finish_kernel``: of each row the best part's token.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import noise
from .sampling import GREEDY_TEMPERATURE, SamplingTensors
from .triton_sample_filter import find_thresholds

PART = 8192
"""Tokens of a row that one program of ``draw_kernel`` looks at."""
DRAW_BLOCK = 1024
EDIT_BLOCK = 256
MASK_BLOCK = 1024
"""Tokens whose bits one program of ``mask_kernel`` looks at."""

GAMMA = tl.constexpr(noise.GAMMA)
MIX_1 = tl.constexpr(noise.MIX_1)
MIX_2 = tl.constexpr(noise.MIX_2)
GREEDY = tl.constexpr(GREEDY_TEMPERATURE)


@triton.jit
def mix(x):
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def penalise_kernel(
    logits, tokens, starts, counts, repetitions, frequencies, presences, logits_stride, BLOCK: tl.constexpr
):
    """One program for one row."""
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetitions + row)
    frequency = tl.load(frequencies + row)
    presence = tl.load(presences + row)
    end = tl.load(starts + row + 1)
    for start in range(tl.load(starts + row), end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < end
        at = logits + row * logits_stride + tl.load(tokens + place, mask=inside, other=0)
        count = tl.load(counts + place, mask=inside, other=0)
        logit = tl.load(at, mask=inside, other=0.0)
        logit = tl.where(logit > 0, logit / repetition, logit * repetition)
        logit = logit - count.to(tl.float32) * frequency - tl.where(count > 0, presence, 0.0)
        tl.store(at, logit, mask=inside)


@triton.jit
def bias_kernel(logits, tokens, starts, values, logits_stride, BLOCK: tl.constexpr):
    """One program for one row."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(starts + row + 1)
    for start in range(tl.load(starts + row), end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < end
        at = logits + row * logits_stride + tl.load(tokens + place, mask=inside, other=0)
        value = tl.load(values + place, mask=inside, other=0.0)
        tl.store(at, tl.load(at, mask=inside, other=0.0) + value, mask=inside)


@triton.jit
def ban_kernel(logits, tokens, starts, logits_stride, BLOCK: tl.constexpr):
    """One program for one row."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(starts + row + 1)
    for start in range(tl.load(starts + row), end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < end
        token = tl.load(tokens + place, mask=inside, other=0)
        tl.store(logits + row * logits_stride + token, float("-inf"), mask=inside)


@triton.jit
def mask_kernel(logits, allowed, logits_stride, allowed_stride, vocab_size, BLOCK: tl.constexpr):
    """Grid (rows, blocks). Where everything is allowed it only reads the mask."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    word = tl.load(allowed + row * allowed_stride + token // 32, mask=inside, other=-1)
    is_banned = inside & (((word >> (token % 32)) & 1) == 0)
    tl.store(logits + row * logits_stride + token, float("-inf"), mask=is_banned)


@triton.jit
def draw_kernel(
    given,
    logits,
    temperatures,
    thresholds,
    seeds,
    branches,
    positions,
    best_of,
    winner_of,
    given_stride,
    logits_stride,
    vocab_size,
    num_parts,
    FILTERED: tl.constexpr,
    EDITED: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, parts): a part's largest perturbed logit and its token. NaN and inf as given make it inf.

    As on CPUs a token needs its logarithms only if 1 - u is below what it would take to win.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    greedy = temperature <= GREEDY
    temperature = tl.where(greedy, 1.0, temperature.to(tl.float64))
    inverse_temperature = 1.0 / temperature
    threshold = float("-inf")
    if FILTERED:
        threshold = tl.load(thresholds + row)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    place = (tl.load(branches + row).to(tl.uint64) << 32) | tl.load(positions + row).to(tl.uint64)
    key = mix(mix(seed + GAMMA) + place)
    lane = tl.arange(0, BLOCK)
    best = tl.full([], float("-inf"), tl.float64)
    winner = part * PART
    for start in range(part * PART, tl.minimum((part + 1) * PART, vocab_size), BLOCK):
        token = start + lane
        inside = token < vocab_size
        x = tl.load(given + row * given_stride + token, mask=inside, other=float("-inf"))
        is_number = x < float("inf")
        if EDITED:
            x = tl.load(logits + row * logits_stride + token, mask=inside, other=float("-inf"))
        x = tl.where(is_number, x, float("inf"))
        may_win = inside & (x >= threshold)
        if greedy:
            may_win &= x.to(tl.float64) > best
        else:
            room = ((mix(key + token.to(tl.uint64) * GAMMA) >> 33) ^ 0x7FFFFFFF).to(tl.float32) * 4.656612873077393e-10
            lead = tl.minimum(x.to(tl.float64) * inverse_temperature - best, 0.0).to(tl.float32)
            may_win &= room <= tl.exp(lead) * 1.001
        if tl.max(may_win.to(tl.int32), axis=0) > 0:
            perturbed = x.to(tl.float64) / temperature
            if not greedy:
                bits = mix(key + token.to(tl.uint64) * GAMMA)
                perturbed -= tl.log(-tl.log(((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16))
            perturbed = tl.where(may_win, perturbed, float("-inf"))
            top = tl.max(perturbed, axis=0)
            if top > best:
                best = top
                # Of equals, the lowest token.
                winner = tl.min(tl.where(perturbed == top, token, 2147483647), axis=0)
    at = row * num_parts + part
    tl.store(best_of + at, best)
    tl.store(winner_of + at, winner)


@triton.jit
def finish_kernel(best_of, winner_of, token_ids, num_parts, PARTS_PADDED: tl.constexpr):
    """One program for one row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PADDED)
    inside = part < num_parts
    at = row * num_parts + part
    best = tl.load(best_of + at, mask=inside, other=float("-inf"))
    winner = tl.load(winner_of + at, mask=inside, other=2147483647)
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, winner, 2147483647), axis=0)
    is_valid = (top > float("-inf")) & (top < float("inf"))
    tl.store(token_ids + row, tl.where(is_valid, token, -1).to(tl.int64))


def sample(logits: Tensor, how: SamplingTensors) -> Tensor:
    """See ``reference.sample``."""
    num_rows, vocab_size = logits.shape
    edited = _edit(logits, how)
    thresholds = find_thresholds(edited, how) if how.filters else how.temperature
    num_parts = triton.cdiv(vocab_size, PART)
    parts = (num_rows, num_parts)
    best = logits.new_empty(parts, dtype=torch.float64)
    winner = logits.new_empty(parts, dtype=torch.int32)
    draw_kernel[parts](
        logits,
        edited,
        how.temperature,
        thresholds,
        how.seeds,
        how.branches,
        how.positions,
        best,
        winner,
        logits.stride(0),
        edited.stride(0),
        vocab_size,
        num_parts,
        FILTERED=how.filters,
        EDITED=edited is not logits,
        PART=PART,
        BLOCK=DRAW_BLOCK,
    )
    token_ids = torch.empty_like(how.seeds)
    padded = triton.next_power_of_2(num_parts)
    finish_kernel[(num_rows,)](best, winner, token_ids, num_parts, PARTS_PADDED=padded)
    return token_ids


def _edit(logits: Tensor, how: SamplingTensors) -> Tensor:
    """The logits with what the rows wish for them; the same tensor where there is nothing."""
    if not how.edits:
        return logits
    grid, edited = (len(logits),), logits.clone()
    stride = edited.stride(0)
    if how.penalties is not None:
        p = how.penalties
        runs = (p.seen.tokens, p.seen.starts, p.counts, p.repetition, p.frequency, p.presence)
        penalise_kernel[grid](edited, *runs, stride, BLOCK=EDIT_BLOCK)
    if how.bias is not None:
        b = how.bias
        bias_kernel[grid](edited, b.runs.tokens, b.runs.starts, b.values, stride, BLOCK=EDIT_BLOCK)
    if how.banned is not None:
        ban_kernel[grid](edited, how.banned.tokens, how.banned.starts, stride, BLOCK=EDIT_BLOCK)
    if how.allowed is not None:
        blocks = (len(logits), triton.cdiv(logits.shape[1], MASK_BLOCK))
        mask_kernel[blocks](edited, how.allowed, stride, how.allowed.stride(0), logits.shape[1], BLOCK=MASK_BLOCK)
    return edited
