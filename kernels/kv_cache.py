"""The paged KV cache: K and V of all layers in one tensor, and the scales of a quantised one in another.

A quantised cache (int8, fp8 e4m3) has one float32 scale for each token and KV head, beside its D values: K = scale ×
stored. Nothing has to be calibrated, an outlier spoils one token and not all, and a kernel multiplies a column of
scores by its K's scale and a column of probabilities by its V's, so that no tile is ever dequantised. At D = 64 int8
takes 68 bytes where float32 takes 256.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .cpu_memory import resident

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The quantised dtypes, and the number that the largest of a token's values becomes."""

SMALLEST_SCALE = 1e-8
"""A scale is not smaller, so that a token of zeros can be divided by its own."""

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's K and V; all four tensors may be views."""

    key: Tensor
    """``[num_blocks, num_kv_heads, block_size, D]``: the tile of one block and one head is contiguous."""
    value: Tensor
    key_scale: Tensor | None = None
    """float32 ``[num_blocks, num_kv_heads, block_size]``, of a quantised cache."""
    value_scale: Tensor | None = None

    @property
    def is_quantized(self) -> bool:
        return self.key_scale is not None


@dataclass(frozen=True, slots=True)
class KVPool:
    """All layers' K and V."""

    data: Tensor
    """``[layers, 2, num_blocks, num_kv_heads, block_size, D]``, K at 0 and V at 1."""
    scales: Tensor | None = None
    """float32 ``[layers, 2, num_blocks, num_kv_heads, block_size]``, of a quantised pool."""

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVPool:
        """Unwritten memory: it may hold anything, NaN too. On CPUs all of it is there; RuntimeError when it is not."""

        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return resident(shape, dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)

        shape = (num_layers, 2, num_blocks, num_kv_heads, block_size)
        scales = allocate(shape, torch.float32) if dtype in LARGEST else None
        return cls(allocate((*shape, head_dim), dtype), scales)

    def layers(self) -> Iterator[KVCache]:
        for index, (key, value) in enumerate(self.data):
            if self.scales is None:
                yield KVCache(key, value)
            else:
                yield KVCache(key, value, self.scales[index, 0], self.scales[index, 1])

    def tensors(self) -> Iterator[Tensor]:
        """What takes the memory."""
        yield self.data
        if self.scales is not None:
            yield self.scales


def bytes_per_block(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of a ``KVPool`` for each of its blocks."""
    per_token = head_dim * dtype.itemsize + (SCALE_BYTES if dtype in LARGEST else 0)
    return num_layers * 2 * num_kv_heads * block_size * per_token


def quantize_tokens(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x [..., D]`` as (``[..., D]`` of a quantised dtype, float32 scales ``[...]``), rounded to nearest even."""
    x = x.float()
    scale = (x.abs().amax(dim=-1) / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
    scaled = x / scale[..., None]
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scale
