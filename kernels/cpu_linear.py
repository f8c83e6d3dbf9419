"""Matrix products of a layer on CPUs: weights packed once in oneDNN's blocked layout.

Measured on two cores with AVX-512 and AMX, 15 layers of SmolLM2-135M one after the other, so that weights come from
memory (212 MB in float32, read at 20 GB/s: 10.7 ms), in ms:

    rows                    1      2      4     16     64    512
    float32, F.linear      12.5   15.0   25.6   37.3   56.3   230
    float32, packed        17.5   16.9   17.1   26.0   55.9   242
    bfloat16, F.linear     16.1   16.4   16.6   16.8   26.9   102    (one thread)
    bfloat16, packed       10.6    9.9   10.1   10.8   15.4   109    (one thread)

So packed float32 weights pay from three rows on; where memory allows, a plain copy serves one and two.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_FOR_ROWS = {torch.float32: 64, torch.bfloat16: 16, torch.float16: 16}
"""oneDNN chooses the layout for this many rows; with fewer it chooses one that is slow for more."""

PLAIN_ROWS = 2
"""Up to so many rows a plain float32 weight is faster than a packed one."""


class PackedLinear:
    """``x[T, in] -> [T, out]`` in x's dtype, by ``weight[out, in]`` in its own: products are taken in the weight's.

    The weight is packed where oneDNN has fast products for its dtype. ``keep_plain`` keeps a float32 weight as it is
    beside its packed form.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, keep_plain: bool = False) -> None:
        self._dtype = weight.dtype
        self._bias = bias
        self._packed = _pack(weight) if _can_pack(weight) else None
        keeps = self._packed is None or (keep_plain and weight.dtype == torch.float32)
        self._plain = weight if keeps else None

    def __call__(self, x: Tensor) -> Tensor:
        rows = x if x.dtype == self._dtype else x.to(self._dtype)
        return self._product(rows).to(x.dtype)

    def _product(self, x: Tensor) -> Tensor:
        if self._plain is not None and (self._packed is None or x.shape[0] <= PLAIN_ROWS):
            return F.linear(x, self._plain, self._bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product


def prepare_linear(keep_plain: bool) -> functools.partial[PackedLinear]:
    """``PackedLinear`` with the choice made for all layers of a model."""
    return functools.partial(PackedLinear, keep_plain=keep_plain)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


def _pack(weight: Tensor) -> Tensor:
    rows = PACKED_FOR_ROWS[weight.dtype]
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)
    return packed
