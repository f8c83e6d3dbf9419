"""Sampling on CPUs: one pass over a row's logits, and then only over those that may be drawn.

The pass finds the largest logit, that of each group of 64, and the sum of exponentials. Filters use these; see
cpu_sample_filter.py.

The draw is that of ``reference.sample``, with most logarithms left out. Token v wins with ``x - log(-log(u))`` above
the best so far only if ``-log(u) < exp(x - best)``; and ``-log(u) >= 1 - u``. So tokens with ``1 - u`` above that bound
are dismissed, in vector instructions, and about ten in a row of 50,000 need their logarithms.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math

import numpy as np
import torch
from numba import carray, prange
from torch import Tensor

from . import noise
from .cpu_numba import Kernel, claim_threads, compile_kernel, fast_exp, fingerprint, float_of_bits, helper, pointer
from .cpu_sample_filter import CHUNK, GROUP, keep
from .sampling import Drawn, SamplingTensors

_f32 = np.float32
_u64 = np.uint64
_GAMMA, _MIX_1, _MIX_2 = _u64(noise.GAMMA), _u64(noise.MIX_1), _u64(noise.MIX_2)
_INFINITY_BITS = np.int32(0x7F800000)
"""Of float32. What has larger ones, apart from the sign, is NaN: kernels are compiled as if comparing would do."""
_LARGEST_FLOAT = _f32(3.4028234e38)
_MARGIN = 1.001
"""Above the rounding of exponentials in the bound."""
_LEAST_LEAD = -36.8
"""exp of it is below every 1 - u."""


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
def _in_order(bits):
    """The bits of a float as an integer of the same order, and back."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@helper
def _largest(bits):
    """Of floats, by their bits: a maximum of integers becomes vector instructions, one of floats does not."""
    largest = np.int32(-0x80000000)
    for i in range(bits.size):
        largest = max(largest, _in_order(bits[i]))
    return float_of_bits(_in_order(largest))


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
def _scan(logits, bits, maxima):
    """Fills in each group's largest; returns the row's, the sum of exp(logit - it), and whether there is a number."""
    largest, total, has_nan = _f32(-np.inf), 0.0, False
    for start in range(0, logits.size, CHUNK):
        chunk = logits[start : start + CHUNK]
        has_nan |= _has_nan(bits[start : start + CHUNK])
        before = largest
        for offset in range(0, chunk.size, GROUP):
            top = _largest(bits[start + offset : min(start + offset + GROUP, bits.size)])
            maxima[(start + offset) // GROUP] = top
            largest = max(largest, top)
        if abs(largest) <= _LARGEST_FLOAT:
            if before < largest:
                total *= np.float64(fast_exp(before - largest))
            total += _sum_of_exponentials(chunk, largest)
    return largest, total, not has_nan and abs(largest) <= _LARGEST_FLOAT


@helper
def _first_equal(logits, maxima, largest):
    group = 0
    while maxima[group] != largest:
        group += 1
    token = group * GROUP
    while logits[token] != largest:
        token += 1
    return token


@helper
def _perturbed(logit, token, key, temperature):
    return np.float64(logit) / temperature - math.log(-math.log(_uniform(key, token)))


@helper
def _may_win(start, key, limit, survivors):
    """Marks those of a group's tokens for which 2^31 (1 - u), rounded down, is at most ``limit``; returns how many."""
    count = 0
    for i in range(survivors.size):
        room = np.int32(~_mix(key + _u64(start + i) * _GAMMA) >> _u64(33))
        survivors[i] = room <= limit
        count += room <= limit
    return count


@helper
def _draw(logits, maxima, key, temperature, winner):
    """Begins with a likely winner: the higher the best so far, the fewer survive."""
    survivors = np.empty(GROUP, np.bool_)
    best = _perturbed(logits[winner], winner, key, temperature)
    for group in range(maxima.size):
        lead = np.float64(maxima[group]) / temperature - best
        if lead < _LEAST_LEAD:
            continue
        start = group * GROUP
        limit = np.int32(min(math.exp(min(lead, 0.0)) * _MARGIN * 2147483648.0, 2147483647.0))
        marks = survivors[: min(GROUP, logits.size - start)]
        if _may_win(start, key, limit, marks) == 0:
            continue
        for token in range(start, start + marks.size):
            if marks[token - start]:
                perturbed = _perturbed(logits[token], token, key, temperature)
                if perturbed > best:
                    best, winner = perturbed, token
    return winner


@helper
def _draw_listed(values, tokens, key, temperature):
    best, winner = -np.inf, np.int64(tokens[0])
    for i in range(values.size):
        lead = np.float64(values[i]) / temperature - best
        if 1.0 - _uniform(key, tokens[i]) <= math.exp(min(lead, 0.0)) * _MARGIN:
            perturbed = _perturbed(values[i], tokens[i], key, temperature)
            if perturbed > best:
                best, winner = perturbed, np.int64(tokens[i])
    return winner


@helper
def _edit(logits, row, banned, banned_starts, seen, seen_starts, counts, repetitions, frequencies, presences):
    """A copy of the logits with penalties, and -inf for banned tokens."""
    edited = np.empty(logits.size, _f32)
    for token in range(logits.size):
        edited[token] = logits[token]
    if seen.size > 0:
        for i in range(seen_starts[row], seen_starts[row + 1]):
            x = edited[seen[i]]
            x = x / repetitions[row] if x > 0 else x * repetitions[row]
            edited[seen[i]] = x - counts[i] * frequencies[row] - (presences[row] if counts[i] > 0 else _f32(0))
    if banned.size > 0:
        for i in range(banned_starts[row], banned_starts[row + 1]):
            edited[banned[i]] = _f32(-np.inf)
    return edited


@helper
def _sample_rows(worker, workers, at, filters, num_banned, num_seen, rows, vocab_size):
    """Every ``workers``-th row. One function for both builds: most of what compiling takes is done once."""
    temperatures = carray(pointer(at[1]), (rows,), _f32)
    top_ks = carray(pointer(at[2]), (rows,), np.int32)
    top_ps = carray(pointer(at[3]), (rows,), _f32)
    min_ps = carray(pointer(at[4]), (rows,), _f32)
    seeds = carray(pointer(at[5]), (rows,), _u64)
    branches = carray(pointer(at[6]), (rows,), np.int32)
    positions = carray(pointer(at[7]), (rows,), np.int32)
    token_ids = carray(pointer(at[8]), (rows,), np.int64)
    logprobs = carray(pointer(at[9]), (rows,), _f32)
    banned = carray(pointer(at[10]), (num_banned,), np.int32)
    banned_starts = carray(pointer(at[11]), (rows + 1,), np.int32)
    seen = carray(pointer(at[12]), (num_seen,), np.int32)
    seen_starts = carray(pointer(at[13]), (rows + 1,), np.int32)
    counts = carray(pointer(at[14]), (num_seen,), np.int32)
    repetitions = carray(pointer(at[15]), (rows,), _f32)
    frequencies = carray(pointer(at[16]), (rows,), _f32)
    presences = carray(pointer(at[17]), (rows,), _f32)
    maxima = np.empty((vocab_size + GROUP - 1) // GROUP, _f32)
    room = vocab_size if filters else 0
    values, tokens, weights = (np.empty(room, _f32), np.empty(room, np.int32), np.empty(room, _f32))
    for row in range(worker, rows, workers):
        given = carray(pointer(at[0] + 4 * row * vocab_size), (vocab_size,), _f32)
        logits = given
        largest, total, is_valid = _scan(given, given.view(np.int32), maxima)
        normaliser = np.float64(largest) + math.log(total) if is_valid else 0.0
        if num_seen > 0 or num_banned > 0:
            logits = _edit(
                given, row, banned, banned_starts, seen, seen_starts, counts, repetitions, frequencies, presences
            )
            largest, total, is_drawable = _scan(logits, logits.view(np.int32), maxima)
            is_valid &= is_drawable
        if not is_valid:
            token_ids[row] = -1
            continue
        token = _first_equal(logits, maxima, largest)
        temperature = np.float64(temperatures[row])
        if temperature > 0:
            place = (_u64(branches[row]) << _u64(32)) | _u64(positions[row])
            key = _mix(_mix(seeds[row] + _GAMMA) + place)
            top_k, top_p, min_p = (np.int64(top_ks[row]), np.float64(top_ps[row]), np.float64(min_ps[row]))
            if filters and (top_k < vocab_size or top_p < 1 or min_p > 0):
                count = keep(logits, maxima, largest, temperature, top_k, top_p, min_p, values, tokens, weights)
                token = _draw_listed(values[:count], tokens[:count], key, temperature)
            else:
                token = _draw(logits, maxima, key, temperature, token)
        token_ids[row] = token
        logprobs[row] = _f32(np.float64(given[token]) - normaliser)


def _build_sample(parallel: bool) -> Kernel:
    sources = fingerprint(__file__)

    def sample(at, filters, num_banned, num_seen, rows, vocab_size, threads):
        _ = sources  # for the cache's key
        workers = threads if parallel else 1
        for worker in prange(workers):
            _sample_rows(np.int64(worker), np.int64(workers), at, filters, num_banned, num_seen, rows, vocab_size)

    return compile_kernel(sample, parallel=parallel)


_SAMPLE = {parallel: _build_sample(parallel) for parallel in (False, True)}


def sample(logits: Tensor, how: SamplingTensors) -> Drawn:
    """See ``reference.sample``."""
    logits = logits.contiguous()
    rows, vocab_size = logits.shape
    drawn = Drawn(how.seeds.new_empty(rows), logits.new_full((rows,), torch.nan))
    parameters = (how.temperature, how.top_k, how.top_p, how.min_p, how.seeds, how.branches, how.positions)
    tensors = (logits, *parameters, drawn.token_ids, drawn.logprobs, *_edits(how))
    num_banned = how.banned.tokens.numel() if how.banned else 0
    num_seen = how.penalties.seen.tokens.numel() if how.penalties else 0
    addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    threads = 1 if rows == 1 else claim_threads()
    _SAMPLE[threads > 1](addresses, how.filters, num_banned, num_seen, rows, vocab_size, threads)
    return drawn


def _edits(how: SamplingTensors) -> tuple[Tensor | None, ...]:
    banned, p = how.banned, how.penalties
    runs = (banned.tokens, banned.starts) if banned else (None, None)
    if p is None:
        return (*runs, *(None,) * 6)
    return (*runs, p.seen.tokens, p.seen.starts, p.counts, p.repetition, p.frequency, p.presence)
