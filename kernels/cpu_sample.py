"""Sampling on CPUs: one pass over a row's logits where nothing is filtered.

The same numbers as ``reference.sample``, with most logarithms left out. Token v wins with ``x - log(-log(u))`` above
the best so far only if ``-log(u) < exp(x - best)``; and ``-log(u) >= 1 - u``. So tokens with ``1 - u`` above that bound
are dismissed, in vector instructions, and about ten in a row of 50,000 need their logarithms.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math

import numpy as np
from numba import carray, prange
from torch import Tensor

from . import noise
from .cpu_numba import Kernel, claim_threads, compile_kernel, fast_exp, helper, pointer

CHUNK = 512
"""Tokens whose bound is tested before the survivors are looked at one by one."""

BUCKETS_PER_NAT = 16.0
NUM_BUCKETS = 512
"""top_p's histogram reaches 32 natural log units below the best token; its last bucket holds the rest."""

_f32 = np.float32
_u64 = np.uint64
_GAMMA, _MIX_1, _MIX_2 = _u64(noise.GAMMA), _u64(noise.MIX_1), _u64(noise.MIX_2)
_MARGIN = _f32(1.001)
"""Above the rounding of float32 in the bound."""


@helper
def _mix(x):
    x = (x ^ (x >> _u64(30))) * _MIX_1
    x = (x ^ (x >> _u64(27))) * _MIX_2
    return x ^ (x >> _u64(31))


@helper
def _uniform(key, token):
    bits = _mix(key + _u64(token) * _GAMMA)
    return (np.float64(np.int64(bits >> _u64(12))) + 0.5) * 2.0**-52


@helper
def _largest(logits):
    largest = _f32(-np.inf)
    for token in range(logits.size):
        # Not max(): this form is recognised as a reduction and vectorised.
        if logits[token] > largest:
            largest = logits[token]
    return largest


@helper
def _greedy(logits):
    largest = _largest(logits)
    for token in range(logits.size):
        if logits[token] == largest:
            return token
    return 0


@helper
def _sift_down(heap, root, size):
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
def _make_heap(values):
    for root in range(values.size // 2 - 1, -1, -1):
        _sift_down(values, root, values.size)


@helper
def _kth_largest(logits, k):
    """The smallest of a heap of the k best so far: most tokens cost one comparison."""
    best = logits[:k].copy()
    _make_heap(best)
    for token in range(k, logits.size):
        if logits[token] > best[0]:
            best[0] = logits[token]
            _sift_down(best, 0, k)
    return best[0]


@helper
def _depth(logit, largest, temperature):
    """How far below the best, in natural log units."""
    return (np.float64(largest) - np.float64(logit)) / temperature


@helper
def _top_p_threshold(logits, temperature, threshold, top_p):
    """The smallest logit that top_p keeps of those not below ``threshold``.

    A histogram over depth finds the bucket in which the probability passes top_p; only that bucket is put in order.
    """
    largest = _largest(logits)
    mass = np.zeros(NUM_BUCKETS)
    for token in range(logits.size):
        if logits[token] >= threshold:
            depth = _depth(logits[token], largest, temperature)
            mass[_bucket(depth)] += math.exp(-depth)
    goal, before, bucket = top_p * mass.sum(), 0.0, 0
    while bucket < NUM_BUCKETS - 1 and before + mass[bucket] < goal:
        before += mass[bucket]
        bucket += 1
    return _smallest_kept(logits, largest, temperature, threshold, bucket, goal - before)


@helper
def _bucket(depth):
    return np.int64(min(depth * BUCKETS_PER_NAT, NUM_BUCKETS - 1.0))


@helper
def _smallest_kept(logits, largest, temperature, threshold, bucket, goal):
    """The first token of a bucket, likeliest first, at which its probability reaches ``goal``; else its last."""
    negated = np.empty(logits.size, _f32)
    count = 0
    for token in range(logits.size):
        if logits[token] >= threshold and _bucket(_depth(logits[token], largest, temperature)) == bucket:
            negated[count] = -logits[token]
            count += 1
    negated = negated[:count]
    _make_heap(negated)
    before, smallest = 0.0, threshold
    while count > 0:
        smallest = -negated[0]
        before += math.exp(-_depth(smallest, largest, temperature))
        if before >= goal:
            break
        count -= 1
        negated[0] = negated[count]
        _sift_down(negated, 0, count)
    return smallest


@helper
def _may_win(logits, start, key, temperature, threshold, best, survivors):
    """Marks the tokens of a chunk that may beat ``best``; returns how many."""
    count = 0
    for i in range(logits.size):
        room = _f32(1.0 - _uniform(key, start + i))
        lead = _f32(np.float64(logits[i]) / temperature - best)
        survives = (logits[i] >= threshold) & (room < fast_exp(min(lead, _f32(80))) * _MARGIN)
        survivors[i] = survives
        count += survives
    return count


@helper
def _draw(logits, key, temperature, threshold):
    survivors = np.empty(CHUNK, np.bool_)
    best, winner = -1e300, 0
    for start in range(0, logits.size, CHUNK):
        chunk = logits[start : start + CHUNK]
        if _may_win(chunk, start, key, temperature, threshold, best, survivors) == 0:
            continue
        for i in range(chunk.size):
            if survivors[i]:
                perturbed = np.float64(chunk[i]) / temperature - math.log(-math.log(_uniform(key, start + i)))
                if perturbed > best:
                    best, winner = perturbed, start + i
    return winner


def _build_sample(parallel: bool) -> Kernel:
    def sample(
        logits_at,
        temperature_at,
        top_k_at,
        top_p_at,
        seeds_at,
        branches_at,
        positions_at,
        out_at,
        rows,
        vocab_size,
        threads,
    ):
        temperatures = carray(pointer(temperature_at), (rows,), _f32)
        top_ks = carray(pointer(top_k_at), (rows,), np.int32)
        top_ps = carray(pointer(top_p_at), (rows,), _f32)
        seeds = carray(pointer(seeds_at), (rows,), _u64)
        branches = carray(pointer(branches_at), (rows,), np.int32)
        positions = carray(pointer(positions_at), (rows,), np.int32)
        out = carray(pointer(out_at), (rows,), np.int64)
        workers = threads if parallel else 1
        for worker in prange(workers):
            for row in range(worker, rows, workers):
                logits = carray(pointer(logits_at + 4 * row * vocab_size), (vocab_size,), _f32)
                if temperatures[row] <= 0:
                    out[row] = _greedy(logits)
                    continue
                temperature = np.float64(temperatures[row])
                threshold = _f32(-np.inf)
                if top_ks[row] < vocab_size:
                    threshold = _kth_largest(logits, max(np.int64(top_ks[row]), 1))
                if top_ps[row] < 1:
                    threshold = _top_p_threshold(logits, temperature, threshold, np.float64(top_ps[row]))
                place = (_u64(branches[row]) << _u64(32)) | _u64(positions[row])
                key = _mix(_mix(seeds[row] + _GAMMA) + place)
                out[row] = _draw(logits, key, temperature, threshold)

    return compile_kernel(sample, parallel=parallel)


_SAMPLE = {parallel: _build_sample(parallel) for parallel in (False, True)}


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
    logits = logits.contiguous()
    rows, vocab_size = logits.shape
    out = seeds.new_empty(rows)
    threads = 1 if rows == 1 else claim_threads()
    parameters = (temperature, top_k, top_p, seeds, branches, positions, out)
    _SAMPLE[threads > 1](logits.data_ptr(), *(p.data_ptr() for p in parameters), rows, vocab_size, threads)
    return out
