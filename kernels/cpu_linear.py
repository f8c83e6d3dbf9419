"""Matrix products of a layer on CPUs: weights laid out once, as the kernel for their kind reads them.

Measured on one core of a processor with AVX-512 and AMX that others used as well: the 30 layers of SmolLM2-135M one
after the other, so that weights come from memory, best of ten, in ms of processor time. In brackets with AVX2 alone:

    rows                       1         4         8        16         64          512
    float32, F.linear      34 (34)   60 (70)   86 (78)   81 (99)   164 (229)   1154 (1631)
    float32, oneDNN        43 (43)   47 (56)   54 (66)   76 (89)   176 (236)   1060 (1680)
    FloatLinear            34 (32)   36 (34)   39 (48)   56 (66)   160 (217)   1097 (1801)
    Int8Linear, tiles      11 (10)   12 (12)   19 (20)   38 (34)   121 (131)   1021 (1262)
    Int8Linear, oneDNN     21        16        17        20        28          140
    AmxInt8Linear          10        10        10        13        19          145
    HalfLinear, bfloat16   25        25        27        29         62          298
    AmxHalfLinear          16        16        16        19         28          162
    Int4Linear             16        17                  33

With few rows, products by int8 weights wait for memory: 106 MB at 10 GB/s. One copy of the weight serves all numbers of
rows, but for int8 on processors that have byte products (VNNI) and no AMX: the tiles' and oneDNN's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu_amx import has_amx
from .cpu_linear_amx import AmxHalfLinear, AmxInt8Linear
from .cpu_linear_float import FloatLinear
from .cpu_linear_int4 import Int4Linear
from .cpu_linear_int8 import Int8Linear
from .cpu_program import Team
from .cpu_tiles import HAS_INT8_TILE
from .quantized import Fp8Weight, Int4Weight, Int8Weight, Weight, dequantize

PACKED_FOR_ROWS = 16
"""oneDNN chooses the layout of half precision for this many rows; with fewer it chooses one that is slow for more."""

logger = logging.getLogger(__name__)


def prepare_linear(team: Team, weight: Weight, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """See ``reference.prepare_linear``. Raises ValueError for fp8, which no CPU multiplies."""
    if isinstance(weight, Fp8Weight):
        raise ValueError("fp8 weights have no product on CPUs; int8 has")
    if isinstance(weight, Int4Weight):
        return Int4Linear(team, weight, bias)
    if isinstance(weight, Int8Weight):
        return _int8_linear(team, weight, bias)
    if weight.dtype == torch.float32:
        return FloatLinear(team, weight, bias)
    return AmxHalfLinear(team, weight, bias) if has_amx(weight.dtype) else HalfLinear(team, weight, bias)


def _int8_linear(team: Team, weight: Int8Weight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    if has_amx(torch.int8):
        return AmxInt8Linear(team, weight, bias)
    if HAS_INT8_TILE:
        return Int8Linear(team, weight, bias)
    logger.warning("this processor has no AVX2: an int8 weight of %s is kept in float32", tuple(weight.values.shape))
    return FloatLinear(team, dequantize(weight), bias)


class HalfLinear:
    """``x[T, in] -> [T, out]`` in x's dtype, by ``weight[out, in]`` in bfloat16 or float16: products are taken in it.

    The weight is packed where oneDNN has fast products for its dtype.
    """

    def __init__(self, team: Team, weight: Tensor, bias: Tensor | None = None) -> None:
        self._team = team
        self._dtype = weight.dtype
        self._bias = bias
        self._num_out = weight.shape[0]
        self._is_packed = _can_pack(weight.dtype)
        self._weight = _pack(weight) if self._is_packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        out = self._team.empty(x.shape[0], self._num_out, dtype=x.dtype)
        self._team.call(self._fill, x.shape[0], x, out)
        return out

    def _fill(self, rows: int, x: Tensor, out: Tensor) -> None:
        out[:rows] = self._product(x[:rows].to(self._dtype))

    def _product(self, x: Tensor) -> Tensor:
        if not self._is_packed:
            return F.linear(x, self._weight, self._bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACKED_FOR_ROWS)
    return packed
