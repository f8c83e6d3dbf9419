"""Log-probabilities on CPUs: one pass over a row's logits, and then only over groups with something likely in them.

The k-th largest logit is at least the k-th largest of the groups' largest logits, so that most groups are not looked at
again; nor are those without a larger logit than the token's, for its rank. The k likeliest are kept in a heap of
integers, which have the order of the logits and, among equals, that of the tokens from the highest to the lowest.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math

import numpy as np
import torch
from numba import carray, prange
from torch import Tensor

from .cpu_numba import Kernel, bits_of_float, claim_threads, compile_kernel, fingerprint, helper, pointer
from .cpu_sample_filter import kth_largest, sift_down
from .cpu_sample_scan import GROUP, in_order, scan
from .sampling import Logprobs

_f32, _i32, _i64 = np.float32, np.int32, np.int64
_LOWEST_KEY = _i64(-0x8000000000000000)
_LAST_TOKEN = _i64(0x7FFFFFFF)


@helper
def _key(logit, token):
    """-0 equals 0."""
    bits = bits_of_float(logit)
    bits = _i32(0) if bits == _i32(-0x80000000) else bits
    return (_i64(in_order(bits)) << _i64(32)) | (_LAST_TOKEN - _i64(token))


@helper
def _token(key):
    return _LAST_TOKEN - (key & _i64(0xFFFFFFFF))


@helper
def _rank(logits, maxima, logit):
    count = _i32(1)
    for group in range(maxima.size):
        if maxima[group] > logit:
            for token in range(group * GROUP, min((group + 1) * GROUP, logits.size)):
                count += _i32(logits[token] > logit)
    return count


@helper
def _likeliest(logits, maxima, heap):
    """Fills the heap with the largest keys, and puts these in order, the largest first."""
    k = heap.size
    heap[:] = _LOWEST_KEY
    threshold = kth_largest(maxima, k) if k <= maxima.size else _f32(-np.inf)
    for group in range(maxima.size):
        if maxima[group] >= threshold:
            for token in range(group * GROUP, min((group + 1) * GROUP, logits.size)):
                if logits[token] >= threshold:
                    key = _key(logits[token], token)
                    if key > heap[0]:
                        heap[0] = key
                        sift_down(heap, 0, k)
    for last in range(k - 1, 0, -1):
        heap[0], heap[last] = heap[last], heap[0]
        sift_down(heap, 0, last)


@helper
def _logprobs_of_rows(worker, workers, at, rows, vocab_size, k):
    """Every ``workers``-th row."""
    chosen = carray(pointer(at[1]), (rows,), _i64)
    logprobs = carray(pointer(at[2]), (rows,), _f32)
    ranks = carray(pointer(at[3]), (rows,), _i32)
    top_token_ids = carray(pointer(at[4]), (rows, k), _i32)
    top_logprobs = carray(pointer(at[5]), (rows, k), _f32)
    maxima = np.empty((vocab_size + GROUP - 1) // GROUP, _f32)
    heap = np.empty(k, _i64)
    for row in range(worker, rows, workers):
        logits = carray(pointer(at[0] + 4 * row * vocab_size), (vocab_size,), _f32)
        largest, total, is_valid = scan(logits, logits.view(_i32), maxima, True)
        if not is_valid:
            continue
        normaliser = np.float64(largest) + math.log(total)
        token = chosen[row]
        if 0 <= token < vocab_size:
            logprobs[row] = _f32(np.float64(logits[token]) - normaliser)
            ranks[row] = _rank(logits, maxima, logits[token])
        if k > 0:
            _likeliest(logits, maxima, heap)
        for i in range(k):
            token = _token(heap[i])
            top_token_ids[row, i] = token
            top_logprobs[row, i] = _f32(np.float64(logits[token]) - normaliser)


def _build(parallel: bool) -> Kernel:
    sources = fingerprint(__file__)

    def logprobs(at, rows, vocab_size, k, threads):
        _ = sources  # for the cache's key
        workers = threads if parallel else 1
        for worker in prange(workers):
            _logprobs_of_rows(_i64(worker), _i64(workers), at, rows, vocab_size, k)

    return compile_kernel(logprobs, parallel=parallel)


_LOGPROBS = {parallel: _build(parallel) for parallel in (False, True)}


def logprobs(logits: Tensor, token_ids: Tensor, k: int) -> Logprobs:
    """See ``reference.logprobs``."""
    logits, token_ids = logits.contiguous(), token_ids.contiguous()
    rows, vocab_size = logits.shape
    of_token, ranks = logits.new_full((rows,), torch.nan), logits.new_zeros(rows, dtype=torch.int32)
    tokens = logits.new_full((rows, k), -1, dtype=torch.int32)
    found = Logprobs(of_token, ranks, tokens, logits.new_full((rows, k), torch.nan))
    tensors = (logits, token_ids, found.logprobs, found.ranks, found.top_token_ids, found.top_logprobs)
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    threads = 1 if rows == 1 else claim_threads()
    _LOGPROBS[threads > 1](addresses, rows, vocab_size, k, threads)
    return found
