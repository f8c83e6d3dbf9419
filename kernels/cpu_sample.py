"""Sampling on CPUs: one pass over a row's logits, and then only over those that may be drawn.

The pass (cpu_sample_scan.py) finds the largest logit and that of each group of 64. Filters use these; see
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
from numba import carray, prange
from torch import Tensor

from . import noise
from .cpu_numba import Kernel, claim_threads, compile_kernel, fingerprint, helper, pointer
from .cpu_sample_edit import TABLE_LEN, edit, edit_table
from .cpu_sample_filter import keep
from .cpu_sample_scan import GROUP, first_equal, scan
from .sampling import GREEDY_TEMPERATURE, SamplingTensors

_f32 = np.float32
_u64 = np.uint64
_GAMMA, _MIX_1, _MIX_2 = _u64(noise.GAMMA), _u64(noise.MIX_1), _u64(noise.MIX_2)
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
def _sample_rows(worker, workers, at, edits, filters, rows, vocab_size):
    """Every ``workers``-th row. One function for both builds: most of what compiling takes is done once."""
    temperatures = carray(pointer(at[1]), (rows,), _f32)
    top_ks = carray(pointer(at[2]), (rows,), np.int32)
    top_ps = carray(pointer(at[3]), (rows,), _f32)
    min_ps = carray(pointer(at[4]), (rows,), _f32)
    seeds = carray(pointer(at[5]), (rows,), _u64)
    branches = carray(pointer(at[6]), (rows,), np.int32)
    positions = carray(pointer(at[7]), (rows,), np.int32)
    token_ids = carray(pointer(at[8]), (rows,), np.int64)
    table = carray(pointer(edits), (TABLE_LEN,), np.int64)
    maxima = np.empty((vocab_size + GROUP - 1) // GROUP, _f32)
    room = vocab_size if filters else 0
    values, tokens, weights = (np.empty(room, _f32), np.empty(room, np.int32), np.empty(room, _f32))
    edited = np.empty(vocab_size if edits != 0 else 0, _f32)
    for row in range(worker, rows, workers):
        given = carray(pointer(at[0] + 4 * row * vocab_size), (vocab_size,), _f32)
        logits = given
        largest, _, is_valid = scan(given, given.view(np.int32), maxima, False)
        if edits != 0 and edit(table, row, given, edited):
            logits = edited
            largest, _, is_drawable = scan(logits, logits.view(np.int32), maxima, False)
            is_valid &= is_drawable
        if not is_valid:
            token_ids[row] = -1
            continue
        token = first_equal(logits, maxima, largest)
        temperature = np.float64(temperatures[row])
        if temperature > GREEDY_TEMPERATURE:
            place = (_u64(branches[row]) << _u64(32)) | _u64(positions[row])
            key = _mix(_mix(seeds[row] + _GAMMA) + place)
            top_k, top_p, min_p = (np.int64(top_ks[row]), np.float64(top_ps[row]), np.float64(min_ps[row]))
            if filters and (top_k < vocab_size or top_p < 1 or min_p > 0):
                count = keep(logits, maxima, largest, temperature, top_k, top_p, min_p, values, tokens, weights)
                token = _draw_listed(values[:count], tokens[:count], key, temperature)
            else:
                token = _draw(logits, maxima, key, temperature, token)
        token_ids[row] = token


def _build_sample(parallel: bool) -> Kernel:
    sources = fingerprint(__file__)

    def sample(at, edits, filters, rows, vocab_size, threads):
        _ = sources  # for the cache's key
        workers = threads if parallel else 1
        for worker in prange(workers):
            _sample_rows(np.int64(worker), np.int64(workers), at, edits, filters, rows, vocab_size)

    return compile_kernel(sample, parallel=parallel)


_SAMPLE = {parallel: _build_sample(parallel) for parallel in (False, True)}


def sample(logits: Tensor, how: SamplingTensors) -> Tensor:
    """See ``reference.sample``."""
    logits = logits.contiguous()
    rows, vocab_size = logits.shape
    token_ids = how.seeds.new_empty(rows)
    parameters = (how.temperature, how.top_k, how.top_p, how.min_p, how.seeds, how.branches, how.positions)
    addresses = tuple(tensor.data_ptr() for tensor in (logits, *parameters, token_ids))
    table = edit_table(how)
    threads = 1 if rows == 1 else claim_threads()
    edits = 0 if table is None else table.buffer_info()[0]
    _SAMPLE[threads > 1](addresses, edits, how.filters, rows, vocab_size, threads)
    return token_ids
