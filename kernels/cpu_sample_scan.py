"""The pass over a row's logits that sampling and log-probabilities on CPUs begin with."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np

from .cpu_numba import fast_exp, float_of_bits, helper

GROUP = 64
"""Tokens whose largest logit is remembered."""

CHUNK = 512
"""Tokens whose exponentials are summed in float32; a multiple of GROUP."""

_f32 = np.float32
LARGEST_FLOAT = _f32(3.4028234e38)
_INFINITY_BITS = np.int32(0x7F800000)
"""Of float32. What has larger ones, apart from the sign, is NaN: kernels are compiled as if comparing would do."""


@helper
def in_order(bits):
    """The bits of a float as an integer of the same order, and back."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@helper
def _largest(bits):
    """Of floats, by their bits: a maximum of integers becomes vector instructions, one of floats does not."""
    largest = np.int32(-0x80000000)
    for i in range(bits.size):
        largest = max(largest, in_order(bits[i]))
    return float_of_bits(in_order(largest))


@helper
def _has_nan(bits):
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    return largest > _INFINITY_BITS


@helper
def _sum_of_exponentials(logits, largest):
    total = _f32(0)
    for i in range(logits.size):
        total += fast_exp(logits[i] - largest)
    return np.float64(total)


@helper
def scan(logits, bits, maxima, adds_up):
    """Fills in each group's largest; returns the row's, the sum of exp(logit - it) where it ``adds_up``, which takes
    most of the time, and whether there is a number."""
    largest, total, has_nan = _f32(-np.inf), 0.0, False
    for start in range(0, logits.size, CHUNK):
        chunk = logits[start : start + CHUNK]
        has_nan |= _has_nan(bits[start : start + CHUNK])
        before = largest
        for offset in range(0, chunk.size, GROUP):
            top = _largest(bits[start + offset : min(start + offset + GROUP, bits.size)])
            maxima[(start + offset) // GROUP] = top
            largest = max(largest, top)
        if adds_up and abs(largest) <= LARGEST_FLOAT:
            if before < largest:
                total *= np.float64(fast_exp(before - largest))
            total += _sum_of_exponentials(chunk, largest)
    return largest, total, not has_nan and abs(largest) <= LARGEST_FLOAT


@helper
def first_equal(logits, maxima, largest):
    """The lowest token of which it is the logit."""
    group = 0
    while maxima[group] != largest:
        group += 1
    token = group * GROUP
    while logits[token] != largest:
        token += 1
    return token
