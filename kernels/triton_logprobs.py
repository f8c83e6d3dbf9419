"""Log-probabilities on GPUs; nothing is asked of the device, so that graphs can hold it.

1. ``part_kernel``: of each part of a row the largest logit, the sum of exponentials, how many logits are larger than
   the token's, and its k likeliest as integers, which have the order of the logits and, among equals, that of the
   tokens from the highest to the lowest: no two are equal.
2. ``torch.topk`` of these integers, where a row has several parts.
3. ``finish_kernel``: of each row the log-probabilities.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling import Logprobs
from .triton_sample_filter import float_of, key_of

PART = 4096
"""Tokens of a row that one program of ``part_kernel`` holds in registers."""
PART_WARPS = 8
TOP_BLOCK = 32

LOWEST_KEY = tl.constexpr(-0x8000000000000000)
LAST_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["k"])
def part_kernel(
    logits,
    token_ids,
    peak_of,
    sum_of,
    larger_of,
    keys_of,
    logits_stride,
    vocab_size,
    num_parts,
    k,
    PART: tl.constexpr,
):
    """Grid (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    logits += row * logits_stride
    chosen = tl.load(token_ids + row)
    is_token = (chosen >= 0) & (chosen < vocab_size)
    logit = tl.load(logits + chosen, mask=is_token, other=float("inf"))
    token = part * PART + tl.arange(0, PART)
    inside = token < vocab_size
    x = tl.load(logits + token, mask=inside, other=float("-inf"))
    peak = tl.max(x, axis=0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    at = row * num_parts + part
    tl.store(peak_of + at, peak)
    tl.store(sum_of + at, tl.sum(tl.exp(x - base), axis=0))
    tl.store(larger_of + at, tl.sum((x > logit).to(tl.int32), axis=0))
    key = key_of(tl.where(x == 0, 0.0, x)).to(tl.int64) << 32  # -0 equals 0
    key = tl.where(inside, key | (token ^ LAST_TOKEN).to(tl.int64), LOWEST_KEY)
    for i in range(k):
        top = tl.max(key, axis=0)
        tl.store(keys_of + at * k + i, top)
        key = tl.where(key == top, LOWEST_KEY, key)


@triton.jit(do_not_specialize=["k"])
def finish_kernel(
    logits,
    token_ids,
    peak_of,
    sum_of,
    larger_of,
    keys,
    logprobs,
    ranks,
    top_token_ids,
    top_logprobs,
    logits_stride,
    keys_stride,
    vocab_size,
    num_parts,
    k,
    PARTS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for one row. A NaN among the logits, or an infinite largest one, has made a sum NaN."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PADDED)
    inside = part < num_parts
    at = row * num_parts + part
    peak = tl.load(peak_of + at, mask=inside, other=float("-inf"))
    total = tl.load(sum_of + at, mask=inside, other=0.0)
    rank = 1 + tl.sum(tl.load(larger_of + at, mask=inside, other=0), axis=0)
    largest = tl.max(peak, axis=0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(total * tl.exp(peak - base), axis=0)
    is_valid = total > 0
    normaliser = base + tl.log(total)
    chosen = tl.load(token_ids + row)
    is_token = is_valid & (chosen >= 0) & (chosen < vocab_size)
    logit = tl.load(logits + row * logits_stride + chosen, mask=is_token, other=0.0)
    tl.store(logprobs + row, tl.where(is_token, logit - normaliser, float("nan")))
    tl.store(ranks + row, tl.where(is_token, rank, 0))
    for start in range(0, k, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = tl.load(keys + row * keys_stride + place, mask=place < k, other=0)
        token = (key & 0xFFFFFFFF).to(tl.int32) ^ LAST_TOKEN
        logprob = float_of((key >> 32).to(tl.int32)) - normaliser
        tl.store(top_token_ids + row * k + place, tl.where(is_valid, token, -1), mask=place < k)
        tl.store(top_logprobs + row * k + place, tl.where(is_valid, logprob, float("nan")), mask=place < k)


def logprobs(logits: Tensor, token_ids: Tensor, k: int) -> Logprobs:
    """See ``reference.logprobs``."""
    num_rows, vocab_size = logits.shape
    num_parts, k_of_part = triton.cdiv(vocab_size, PART), min(k, PART)
    parts = (num_rows, num_parts)
    peak, total = logits.new_empty(parts), logits.new_empty(parts)
    larger = logits.new_empty(parts, dtype=torch.int32)
    keys = logits.new_empty((num_rows, num_parts * k_of_part), dtype=torch.int64)
    stride = logits.stride(0)
    part_kernel[parts](
        logits,
        token_ids,
        peak,
        total,
        larger,
        keys,
        stride,
        vocab_size,
        num_parts,
        k_of_part,
        PART=PART,
        num_warps=PART_WARPS,
    )
    if k > 0 and num_parts > 1:
        keys = keys.topk(k, dim=-1).values
    found = Logprobs(
        logits.new_empty(num_rows),
        logits.new_empty(num_rows, dtype=torch.int32),
        logits.new_empty((num_rows, k), dtype=torch.int32),
        logits.new_empty((num_rows, k)),
    )
    finish_kernel[(num_rows,)](
        logits,
        token_ids,
        peak,
        total,
        larger,
        keys,
        found.logprobs,
        found.ranks,
        found.top_token_ids,
        found.top_logprobs,
        stride,
        keys.stride(0),
        vocab_size,
        num_parts,
        k,
        PARTS_PADDED=triton.next_power_of_2(num_parts),
        BLOCK=TOP_BLOCK,
    )
    return found
