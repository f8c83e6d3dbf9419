"""What surrounds the products of a mixture of experts on CPUs: tokens go to their experts, and results come back.

    route     logits                            → of each token its k experts, the likeliest first, and their weights
    sort      experts [T, k]                    → their pairs (token, choice) by expert, in blocks of one expert's rows
    gather    x [T, hidden]                     → rows in that order
    combine   what the experts give, in that order, and weights → [T, hidden]

A pair's number is token × k + choice. Each function here is a launch of a team; see cpu_team.py.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray

from .cpu_numba import exact_helper, fast_exp, fingerprint, pointer
from .cpu_team import compile_work, note_done, rows_at_once, take, words
from .cpu_tiles import BLOCK_ROWS

_f32, _i32 = np.float32, np.int32
_LOWEST = _f32(np.finfo(np.float32).min)


def most_block_words(num_pairs: int, num_experts: int) -> int:
    """int32: the number of blocks, then of each its expert, its first row and the one after its last."""
    return 1 + 3 * (min(num_pairs, num_experts) + num_pairs // BLOCK_ROWS)


@exact_helper
def floats(at, size):
    return carray(pointer(at), (size,), _f32)


@exact_helper
def ints(at, size):
    return carray(pointer(at), (size,), _i32)


@exact_helper
def _comparable(logit):
    """See ``reference_experts.LOWEST``."""
    return logit if logit > _LOWEST else _LOWEST


@exact_helper
def _next_best(logits, before, value_before):
    """The likeliest expert after ``before`` in the order of choice; of the first, ``before`` is -1."""
    best, best_value = -1, _LOWEST
    for expert in range(logits.size):
        value = _comparable(logits[expert])
        is_left = before < 0 or value < value_before or (value == value_before and expert > before)
        if is_left and (best < 0 or value > best_value):
            best, best_value = expert, value
    return best, best_value


@exact_helper
def _route_row(logits, renormalise, experts, weights):
    best, value, total = -1, _LOWEST, _f32(0)
    for choice in range(experts.size):
        best, value = _next_best(logits, best, value)
        experts[choice], weights[choice] = best, value
    largest = weights[0]
    for choice in range(experts.size):
        weights[choice] = fast_exp(weights[choice] - largest)
        total += weights[choice]
    if not renormalise:
        total = _f32(0)
        for expert in range(logits.size):
            total += fast_exp(_comparable(logits[expert]) - largest)
    for choice in range(experts.size):
        weights[choice] /= total


@functools.cache
def route() -> Any:
    sources = fingerprint(__file__)

    def route(words_at, call_at, tally_at, member, team):
        _ = sources  # for the cache's key
        logits_at, stride, num_experts, num_chosen, renormalise, experts_at, weights_at = words(words_at, 7)
        (rows,) = words(call_at, 1)
        at_once = rows_at_once(num_experts * num_chosen)
        first, last = take(tally_at, rows, at_once)
        while first < last:
            for row in range(first, last):
                logits = floats(logits_at + 4 * row * stride, num_experts)
                at = 4 * row * num_chosen
                _route_row(logits, renormalise, ints(experts_at + at, num_chosen), floats(weights_at + at, num_chosen))
            note_done(tally_at, first, last)
            first, last = take(tally_at, rows, at_once)
        return rows

    return compile_work(route, exact=True)


@exact_helper
def _sort(experts, counts, order, place, blocks):
    """By counting, so that an expert's tokens stay in order. ``counts`` is scratch, one for each expert."""
    counts[:] = 0
    for pair in range(experts.size):
        counts[experts[pair]] += 1
    start, num_blocks = 0, 0
    for expert in range(counts.size):
        end = start + counts[expert]
        counts[expert] = start
        while start < end:
            stop = min(start + BLOCK_ROWS, end)
            at = 1 + 3 * num_blocks
            blocks[at], blocks[at + 1], blocks[at + 2] = expert, start, stop
            start, num_blocks = stop, num_blocks + 1
    blocks[0] = num_blocks
    for pair in range(experts.size):
        row = counts[experts[pair]]
        counts[experts[pair]] += 1
        order[row], place[pair] = pair, row


@functools.cache
def sort() -> Any:
    sources = fingerprint(__file__)

    def sort(words_at, call_at, tally_at, member, team):
        """One task: a pass over some thousand small integers."""
        _ = sources  # for the cache's key
        experts_at, num_chosen, counts_at, num_experts, order_at, place_at, blocks_at, block_words = words(words_at, 8)
        pairs = words(call_at, 1)[0] * num_chosen
        first, last = take(tally_at, 1, 1)
        if first < last:
            of_pairs = ints(experts_at, pairs), ints(order_at, pairs), ints(place_at, pairs)
            _sort(of_pairs[0], ints(counts_at, num_experts), of_pairs[1], of_pairs[2], ints(blocks_at, block_words))
            note_done(tally_at, first, last)
        return 1

    return compile_work(sort, exact=True)


@functools.cache
def gather() -> Any:
    sources = fingerprint(__file__)

    def gather(words_at, call_at, tally_at, member, team):
        _ = sources  # for the cache's key
        x_at, x_stride, width, num_chosen, order_at, out_at = words(words_at, 6)
        rows = words(call_at, 1)[0] * num_chosen
        order, at_once = ints(order_at, rows), rows_at_once(width)
        first, last = take(tally_at, rows, at_once)
        while first < last:
            for row in range(first, last):
                token = np.int64(order[row]) // num_chosen
                floats(out_at + 4 * row * width, width)[:] = floats(x_at + token * x_stride, width)
            note_done(tally_at, first, last)
            first, last = take(tally_at, rows, at_once)
        return rows

    return compile_work(gather, exact=True)


@exact_helper
def _add_scaled(total, x, factor):
    for i in range(total.size):
        total[i] += x[i] * factor


@functools.cache
def combine() -> Any:
    sources = fingerprint(__file__)

    def combine(words_at, call_at, tally_at, member, team):
        _ = sources  # for the cache's key
        given_at, stride, place_at, weights_at, num_chosen, out_at, width = words(words_at, 7)
        (rows,) = words(call_at, 1)
        place, weights = ints(place_at, rows * num_chosen), floats(weights_at, rows * num_chosen)
        at_once = rows_at_once(width * num_chosen)
        first, last = take(tally_at, rows, at_once)
        while first < last:
            for row in range(first, last):
                total = floats(out_at + 4 * row * width, width)
                total[:] = _f32(0)
                for pair in range(row * num_chosen, (row + 1) * num_chosen):
                    _add_scaled(total, floats(given_at + 4 * stride * np.int64(place[pair]), width), weights[pair])
            note_done(tally_at, first, last)
            first, last = take(tally_at, rows, at_once)
        return rows

    return compile_work(combine, exact=True)
