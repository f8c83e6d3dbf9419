"""Sampling's filters on GPUs: min_p, top_k and top_p give a row one threshold, which is found without sorting.

A row is read by one program some ten times over, mostly from the L2 cache: each time three thresholds are tried. Floats
are compared as integers of the same order, so that the search ends whatever they are.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling import GREEDY_TEMPERATURE, SamplingTensors

BLOCK = 4096
NUM_WARPS = 16

GREEDY = tl.constexpr(GREEDY_TEMPERATURE)


@triton.jit
def key_of(x):
    """The bits of a float32 as an int32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def largest_of(logits, vocab_size, BLOCK: tl.constexpr):
    """The largest logit, and how many are not -inf."""
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + lane
        x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
        largest = tl.maximum(largest, x)
        count += (x > float("-inf")).to(tl.int32)
    return tl.max(largest, axis=0), tl.sum(count, axis=0)


@triton.jit
def weight_from(logits, vocab_size, low, largest, inverse_temperature, BLOCK: tl.constexpr):
    """The probability of all tokens whose keys are not below ``low``, in units of the best one's."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        token = start + lane
        x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
        total += tl.where(key_of(x) >= low, tl.exp((x - largest) * inverse_temperature), 0.0)
    return tl.sum(total.to(tl.float64), axis=0)


@triton.jit
def search(
    logits,
    vocab_size,
    low,
    num_low,
    largest,
    inverse_temperature,
    goal,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A key, not below ``low``, that separates the same tokens as the largest one down to which the tokens reach
    ``goal``: by their number, or by their probability. ``num_low``: at least the number of tokens from ``low`` up.

    Each pass over the row quarters the interval [low, high) in which that key lies, first by guess. It ends when one
    token is left in it, or when as many as are wanted are above it; at the latest after 17 passes.
    """
    lane = tl.arange(0, BLOCK)
    low = low.to(tl.int64)
    high = key_of(largest).to(tl.int64) + 1
    num_high = tl.full([], 0, tl.int64)
    num_low = num_high + num_low
    step = 1.0 / inverse_temperature
    first = key_of(largest - 24.0 * step).to(tl.int64)
    second = key_of(largest - 8.0 * step).to(tl.int64)
    third = key_of(largest - 2.0 * step).to(tl.int64)
    while (high - low > 1) & (num_low - num_high > 1):
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, low + 1), high - 1)
        third = tl.minimum(tl.maximum(third, low + 1), high - 1)
        count_1 = tl.zeros([BLOCK], tl.int32)
        count_2 = tl.zeros([BLOCK], tl.int32)
        count_3 = tl.zeros([BLOCK], tl.int32)
        sum_1 = tl.zeros([BLOCK], tl.float32)
        sum_2 = tl.zeros([BLOCK], tl.float32)
        sum_3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            token = start + lane
            inside = token < vocab_size
            x = tl.load(logits + token, mask=inside, other=float("-inf"))
            key = key_of(x)
            above_1 = inside & (key >= first.to(tl.int32))
            above_2 = inside & (key >= second.to(tl.int32))
            above_3 = inside & (key >= third.to(tl.int32))
            count_1 += above_1.to(tl.int32)
            count_2 += above_2.to(tl.int32)
            count_3 += above_3.to(tl.int32)
            if WEIGHTED:
                weight = tl.exp((x - largest) * inverse_temperature)
                sum_1 += tl.where(above_1, weight, 0.0)
                sum_2 += tl.where(above_2, weight, 0.0)
                sum_3 += tl.where(above_3, weight, 0.0)
        num_1 = tl.sum(count_1, axis=0).to(tl.int64)
        num_2 = tl.sum(count_2, axis=0).to(tl.int64)
        num_3 = tl.sum(count_3, axis=0).to(tl.int64)
        if WEIGHTED:
            reached_1 = tl.sum(sum_1.to(tl.float64), axis=0) >= goal
            reached_2 = tl.sum(sum_2.to(tl.float64), axis=0) >= goal
            reached_3 = tl.sum(sum_3.to(tl.float64), axis=0) >= goal
        else:
            reached_1 = num_1.to(tl.float64) >= goal
            reached_2 = num_2.to(tl.float64) >= goal
            reached_3 = num_3.to(tl.float64) >= goal
        high = tl.where(reached_3, high, tl.where(reached_2, third, tl.where(reached_1, second, first)))
        num_high = tl.where(reached_3, num_high, tl.where(reached_2, num_3, tl.where(reached_1, num_2, num_1)))
        low = tl.where(reached_3, third, tl.where(reached_2, second, tl.where(reached_1, first, low)))
        num_low = tl.where(reached_3, num_3, tl.where(reached_2, num_2, tl.where(reached_1, num_1, num_low)))
        if not WEIGHTED:
            num_high = tl.where(num_low.to(tl.float64) == goal, num_low, num_high)
        first = low + (high - low) // 4
        second = low + (high - low) // 2
        third = low + (high - low) * 3 // 4
    return low.to(tl.int32)


@triton.jit
def threshold_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    thresholds,
    logits_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """One program for one row: the smallest logit that min_p, then top_k, then top_p keep; -inf if they keep all."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    threshold = float("-inf")
    if (temperature > GREEDY) & ((top_k < vocab_size) | (top_p < 1) | (min_p > 0)):
        logits += row * logits_stride
        largest, num_possible = largest_of(logits, vocab_size, BLOCK)
        inverse_temperature = 1.0 / temperature
        low = key_of(tl.full([], float("-inf"), tl.float32))
        if min_p > 0:
            exact = largest.to(tl.float64) + temperature.to(tl.float64) * tl.log(min_p.to(tl.float64))
            rounded = exact.to(tl.float32)
            low = key_of(rounded) + (rounded.to(tl.float64) < exact).to(tl.int32)
        if top_k < num_possible:
            goal = tl.maximum(top_k, 1).to(tl.float64)
            found = search(
                logits,
                vocab_size,
                key_of(tl.full([], -3.4028234663852886e38, tl.float32)),
                num_possible,
                largest,
                inverse_temperature,
                goal,
                False,
                BLOCK,
            )
            low = tl.maximum(low, found)
        if top_p < 1:
            goal = top_p.to(tl.float64) * weight_from(logits, vocab_size, low, largest, inverse_temperature, BLOCK)
            low = search(logits, vocab_size, low, num_possible, largest, inverse_temperature, goal, True, BLOCK)
        threshold = float_of(low)
    tl.store(thresholds + row, threshold)


def find_thresholds(logits: Tensor, how: SamplingTensors) -> Tensor:
    """float32 ``[R]``: the smallest logit that each row keeps."""
    thresholds = torch.empty_like(how.temperature)
    threshold_kernel[(len(logits),)](
        logits,
        how.temperature,
        how.top_k,
        how.top_p,
        how.min_p,
        thresholds,
        logits.stride(0),
        logits.shape[1],
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return thresholds
