"""Sampling's filters on CPUs: min_p, top_k and top_p leave a short list of tokens.

top_k's threshold is at least the k-th largest of the groups' largest logits, and top_p's lies where all tokens below it
could not hold ``1 - top_p`` of the probability. So the few tokens above such a bound are gathered, and the filters are
exact on these.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math

import numpy as np

from .cpu_numba import fast_exp, helper
from .cpu_sample_scan import CHUNK, GROUP, LARGEST_FLOAT

NUM_BUCKETS = 512
"""Of top_p's histogram over the depth below the best token."""

DEEPEST = 88.0
"""Depth of the histogram, times the temperature: exp of it is the smallest number that ``fast_exp`` gives."""

_f32 = np.float32
_u64 = np.uint64


@helper
def _weight(logit, largest, inverse_temperature):
    """A probability in units of the largest one: the depth is rounded once."""
    return fast_exp(_f32((np.float64(logit) - np.float64(largest)) * inverse_temperature))


@helper
def _sum_of_weights(logits, largest, inverse_temperature, threshold):
    total = _f32(0)
    for i in range(logits.size):
        if logits[i] >= threshold:
            total += _weight(logits[i], largest, inverse_temperature)
    return np.float64(total)


@helper
def sift_down(heap, root, size):
    """Lets the element at ``root`` sink to its place in a heap whose smallest is first."""
    value = heap[root]
    while True:
        child = 2 * root + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if child >= size or heap[child] >= value:
            break
        heap[root] = heap[child]
        root = child
    heap[root] = value


@helper
def make_heap(values):
    for root in range(values.size // 2 - 1, -1, -1):
        sift_down(values, root, values.size)


@helper
def kth_largest(values, k):
    """The smallest of a heap of the k best so far: most values cost one comparison."""
    best = np.empty(k, _f32)
    for i in range(k):
        best[i] = values[i]
    make_heap(best)
    for i in range(k, values.size):
        if values[i] > best[0]:
            best[0] = values[i]
            sift_down(best, 0, k)
    return best[0]


@helper
def _gather(logits, maxima, threshold, values, tokens):
    """The logits not below a threshold, and their tokens; returns how many."""
    count = _u64(0)  # of an index that may be negative, each use would be tested for that
    for group in range(maxima.size):
        if maxima[group] >= threshold:
            for token in range(group * GROUP, min((group + 1) * GROUP, logits.size)):
                values[count], tokens[count] = logits[token], token
                count += _u64(logits[token] >= threshold)
    return np.int64(count)


@helper
def _drop_below(threshold, values, tokens, count):
    kept = _u64(0)
    for i in range(count):
        values[kept], tokens[kept] = values[i], tokens[i]
        kept += _u64(values[i] >= threshold)
    return np.int64(kept)


@helper
def _min_p_threshold(largest, temperature, min_p):
    """The smallest float32 that min_p keeps, which is not -inf."""
    if min_p <= 0:
        return -LARGEST_FLOAT
    exact = np.float64(largest) + temperature * math.log(min_p)
    threshold = _f32(exact)
    return threshold if np.float64(threshold) >= exact else np.nextafter(threshold, _f32(np.inf))


@helper
def _bucket_of(logit, largest, lowest, scale):
    return np.int64((np.float64(largest) - max(np.float64(logit), lowest)) * scale)


@helper
def _top_p_threshold(values, weights, largest, inverse_temperature, goal):
    """The smallest of ``values`` for which those above it weigh less than ``goal``; overwrites ``weights``.

    A histogram over depth finds the bucket in which the sum passes the goal; only that bucket is put in order. The last
    one has all that weigh next to nothing, -inf among them.
    """
    smallest = largest
    for i in range(values.size):
        smallest = min(smallest, values[i])
    lowest = max(np.float64(smallest), np.float64(largest) - DEEPEST / inverse_temperature)
    scale = (NUM_BUCKETS - 1.0) / max(np.float64(largest) - lowest, 1e-30)
    for i in range(values.size):
        weights[i] = _weight(values[i], largest, inverse_temperature)
    sums = np.zeros(NUM_BUCKETS)
    for i in range(values.size):
        sums[_bucket_of(values[i], largest, lowest, scale)] += weights[i]
    before, bucket = 0.0, 0
    while bucket < NUM_BUCKETS - 1 and before + sums[bucket] < goal:
        before += sums[bucket]
        bucket += 1
    count = 0
    for i in range(values.size):
        if _bucket_of(values[i], largest, lowest, scale) == bucket:
            weights[count] = -values[i]
            count += 1
    return _last_needed(weights[:count], largest, inverse_temperature, goal - before)


@helper
def _last_needed(negated, largest, inverse_temperature, goal):
    """The first logit, likeliest first, at which the weights reach ``goal``; else the last."""
    make_heap(negated)
    before, smallest, count = 0.0, largest, negated.size
    while count > 0:
        smallest = -negated[0]
        before += np.float64(_weight(smallest, largest, inverse_temperature))
        if before >= goal:
            break
        count -= 1
        negated[0] = negated[count]
        sift_down(negated, 0, count)
    return smallest


@helper
def keep(logits, maxima, largest, temperature, top_k, top_p, min_p, values, tokens, weights):
    """Gathers the tokens that min_p, then top_k, then top_p leave; returns how many."""
    threshold, inverse_temperature, total = (_min_p_threshold(largest, temperature, min_p), 1 / temperature, 0.0)
    if top_k < logits.size:
        bound = kth_largest(maxima, top_k) if top_k <= maxima.size else threshold
        count = _gather(logits, maxima, max(bound, threshold), values, tokens)
        if count > top_k:
            count = _drop_below(kth_largest(values[:count], top_k), values, tokens, count)
        total = _sum_of_weights(values[:count], largest, inverse_temperature, threshold)
    else:
        if top_p < 1:
            for start in range(0, logits.size, CHUNK):
                chunk = logits[start : start + CHUNK]
                total += _sum_of_weights(chunk, largest, inverse_temperature, threshold)
            depth = temperature * (math.log(logits.size / ((1 - top_p) * total)) + 0.001)
            threshold = max(threshold, _f32(np.float64(largest) - max(depth, 0.0)))
        count = _gather(logits, maxima, threshold, values, tokens)
    if top_p < 1:
        lowest = _top_p_threshold(values[:count], weights, largest, inverse_temperature, top_p * total)
        count = _drop_below(lowest, values, tokens, count)
    return count
