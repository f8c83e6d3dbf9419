"""What products on CPUs end with: the columns that a panel has too many are cut off, digits of inputs are added up."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from .cpu_numba import PARALLEL_ELEMENTS, exact_helper, fingerprint, pointer
from .cpu_program import Launch, Team
from .cpu_team import compile_work, note_done, rows_at_once, take, words

_f32 = np.float32


@exact_helper
def _row(at, size):
    return carray(pointer(at), (size,), _f32)


@exact_helper
def _finish_row(first, second, bias, has_second, has_bias, out):
    for i in range(out.size):
        out[i] = first[i]
    if has_second:
        for i in range(out.size):
            out[i] += second[i]
    if has_bias:
        for i in range(out.size):
            out[i] += bias[i]


@functools.cache
def _finish() -> Any:
    sources = fingerprint(__file__)

    def finish(words_at, call_at, tally_at, member, team):
        _ = sources  # for the cache's key
        wide_at, width, digits, bias_at, out_at, size = words(words_at, 6)
        (rows,) = words(call_at, 1)
        at_once = rows_at_once(width)
        first, last = take(tally_at, rows, at_once)
        while first < last:
            for row in range(first, last):
                one = _row(wide_at + 4 * row * width, size)
                other = _row(wide_at + 4 * (rows + row) * width, size)
                bias = _row(bias_at, size)
                _finish_row(one, other, bias, digits == 2, bias_at != 0, _row(out_at + 4 * row * size, size))
            note_done(tally_at, first, last)
            first, last = take(tally_at, rows, at_once)
        return rows

    return compile_work(finish, exact=True)


class Finish:
    """From ``wide [digits * T, num_out or more]`` to ``[T, num_out]`` in x's dtype: the sum of a token's rows and of
    ``bias``. ``wide`` itself where there is nothing to do."""

    def __init__(self, team: Team, num_out: int, num_digits: int = 1, bias: Tensor | None = None) -> None:
        self._team = team
        self._num_out = num_out
        self._num_digits = num_digits
        self._bias = None if bias is None else bias.detach().float().contiguous()

    def __call__(self, wide: Tensor, x: Tensor) -> Tensor:
        out = wide
        if self._num_digits > 1 or self._bias is not None or wide.shape[1] > self._num_out:
            out = self._finished(wide)
        if x.dtype == torch.float32:
            return out
        self._team.must_not_record(f"a product in {x.dtype}")
        return out.to(x.dtype)

    def _finished(self, wide: Tensor) -> Tensor:
        num_rows = wide.shape[0] // self._num_digits
        out = self._team.empty(num_rows, self._num_out)
        bias_at = 0 if self._bias is None else self._bias.data_ptr()
        at = wide.data_ptr(), wide.shape[1], self._num_digits, bias_at, out.data_ptr(), self._num_out
        self._team.run([Launch(_finish().address, at)], num_rows, is_small=wide.numel() < PARALLEL_ELEMENTS)
        return out
