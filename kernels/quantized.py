"""Weights of matrix products in fewer bits: what ``Kernels.prepare_linear`` takes beside a plain tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

LARGEST_INT8 = 127.0
DIGIT_RATIO = 254.0
"""A second digit's unit in a first one's: what rounding leaves, at most half a unit, is at most 127 of them."""
LARGEST_FP8 = 448.0


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """One scale for each output channel: weight = scales[:, None] × values.

    A product quantises its activations too, one scale for each token, and sums in int32 ("W8A8").
    """

    values: Tensor
    """int8 ``[out, in]``"""
    scales: Tensor
    """float32 ``[out]``"""
    input_digits: int = 1
    """How many int8 numbers stand for an input: with 2, the second is what rounding left of the first, in 254ths of its
    unit. A product then has twice the rows and the precision of 16 bits, for inputs whose largest value is far above
    the others. The weight is still read once."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """As ``Int8Weight``, in fp8 e4m3 and summed in float32."""

    values: Tensor
    """float8_e4m3fn ``[out, in]``"""
    scales: Tensor
    """float32 ``[out]``"""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Groups of consecutive input channels: weight = scale × q + minimum, q from 0 to 15.

    Activations stay as they are ("W4A16"). GPTQ, AWQ, and GGUF's Q4_0, Q4_1 and Q4_K all have this form.
    """

    packed: Tensor
    """uint8 ``[out, in // 2]``: of columns 2i and 2i + 1 the first is in the low four bits."""
    scales: Tensor
    """float32 or float16 ``[out, in // group_size]``"""
    minimums: Tensor
    """As ``scales``."""
    permutation: Tensor | None = None
    """int64 ``[in]``: column j of the packed weight multiplies input ``permutation[j]`` (GPTQ's ``desc_act``)."""

    @property
    def group_size(self) -> int:
        return 2 * self.packed.shape[1] // self.scales.shape[1]


Weight: TypeAlias = Tensor | Int8Weight | Fp8Weight | Int4Weight


def quantize_int8(weight: Tensor, *, input_digits: int = 1) -> Int8Weight:
    """``weight [out, in]``, rounded to nearest; the largest of each row becomes ±127."""
    scales = _scales(weight, LARGEST_INT8)
    return Int8Weight((weight.float() / scales[:, None]).round().to(torch.int8), scales, input_digits)


def quantize_fp8(weight: Tensor) -> Fp8Weight:
    """``weight [out, in]``, rounded to nearest; the largest of each row becomes ±448."""
    scales = _scales(weight, LARGEST_FP8)
    return Fp8Weight((weight.float() / scales[:, None]).to(torch.float8_e4m3fn), scales)


def _scales(weight: Tensor, largest: float) -> Tensor:
    return (weight.float().abs().amax(dim=1) / largest).clamp(min=torch.finfo(torch.float32).tiny)


def dequantize(weight: Weight) -> Tensor:
    """What the weight stands for, float32 ``[out, in]``; a plain tensor as it is."""
    if isinstance(weight, Tensor):
        return weight
    if isinstance(weight, Int4Weight):
        return _dequantize_int4(weight)
    return weight.values.float() * weight.scales[:, None]


def _dequantize_int4(weight: Int4Weight) -> Tensor:
    out, groups = weight.scales.shape
    q = torch.stack((weight.packed & 15, weight.packed >> 4), dim=-1).view(out, groups, -1)
    columns = (q * weight.scales.float()[..., None] + weight.minimums.float()[..., None]).view(out, -1)
    if weight.permutation is None:
        return columns
    plain = torch.empty_like(columns)
    plain[:, weight.permutation] = columns
    return plain
