"""What is written to slots and copied between blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.backend import Kernels
from octavo.kernels.kv_cache import LARGEST, KVCache, KVPool

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [1, 60])
def test_tokens_go_to_their_slots_and_nowhere_else(
    kernels: Kernels, dtype: torch.dtype, slot_dtype: torch.dtype, num_tokens: int
) -> None:
    num_blocks, num_heads, block_size, head_dim = 40, 3, 16, 80
    cache = torch.full((2, num_blocks, num_heads, block_size, head_dim), torch.nan, dtype=dtype)
    fused = torch.randn(num_tokens, 2 * num_heads + 1, head_dim).to(dtype)
    key, value = fused[:, 1 : 1 + num_heads], fused[:, 1 + num_heads :]
    slots = torch.randperm(num_blocks * block_size)[:num_tokens].to(slot_dtype)
    slots[::5] = -1
    kernels.write_kv(key, value, KVCache(cache[0], cache[1]), slots)
    by_slot = cache.transpose(2, 3).flatten(1, 2)
    written = slots >= 0
    assert torch.equal(by_slot[0, slots[written].long()], key[written])
    assert torch.equal(by_slot[1, slots[written].long()], value[written])
    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool)
    untouched[slots[written].long()] = False
    assert by_slot[:, untouched].isnan().all()


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_quantised_on_the_way(
    kernels: Kernels, unwritten_cache: Callable[..., KVCache], dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """To the bit as the reference: to nearest even, each token and head by its largest value, zeros too."""
    num_tokens, num_heads, block_size, head_dim = 30, 3, 16, 80
    spread = torch.logspace(-4, 0, head_dim)
    # Without -0.0, whose sign an interpreted conversion to fp8 loses.
    key, value = (torch.randn(2, num_tokens, num_heads, head_dim) * spread).to(dtype) + 0.0
    key[3] = 0.0
    # Halfway between two numbers of either dtype, once the largest is 127 or 448.
    value[4, :, :4] = torch.tensor([LARGEST[kv_dtype], 2.5, 3.5, 17.0])
    value[4, :, 4:] = 0.5
    caches = [unwritten_cache(4, num_heads, block_size, head_dim, kv_dtype) for _ in range(2)]
    slots = torch.randperm(4 * block_size)[:num_tokens]
    slots[::5] = -1
    kernels.write_kv(key, value, caches[0], slots)
    reference.write_kv(key, value, caches[1], slots)
    for actual, wanted in zip(*([c.key, c.value, c.key_scale, c.value_scale] for c in caches), strict=True):
        bits = torch.int32 if wanted.dtype == torch.float32 else torch.uint8
        assert torch.equal(actual.view(bits), wanted.view(bits))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_copied_in_every_layer(kernels: Kernels, dtype: torch.dtype) -> None:
    cache = torch.randn(3, 2, 8, 2, 16, 80).to(dtype)
    before = cache.clone()
    kernels.copy_blocks(KVPool(cache), torch.tensor([[1, 2], [1, 5], [7, 0]], dtype=torch.int32))
    expected = before.clone()
    expected[:, :, [2, 5, 0]] = before[:, :, [1, 1, 7]]
    assert torch.equal(cache, expected)


def test_scales_are_copied_with_what_they_scale(kernels: Kernels) -> None:
    pool = KVPool.allocate(2, 6, 3, 16, 80, torch.int8, torch.device(torch.get_default_device()))
    assert pool.scales is not None
    pool.data.copy_(torch.randint(-127, 128, pool.data.shape))
    pool.scales.copy_(torch.rand(pool.scales.shape))
    wanted = KVPool(pool.data.clone(), pool.scales.clone())
    copies = torch.tensor([[1, 2], [3, 1]], dtype=torch.int32)
    kernels.copy_blocks(pool, copies)
    reference.copy_blocks(wanted, copies)
    for actual, expected in zip(pool.tensors(), wanted.tensors(), strict=True):
        assert torch.equal(actual, expected)


def test_a_source_may_be_overwritten_by_a_later_copy(kernels: Kernels) -> None:
    cache = torch.randn(2, 2, 4, 1, 16, 64)
    before = cache.clone()
    kernels.copy_blocks(KVPool(cache), torch.tensor([[1, 2], [3, 1]], dtype=torch.int32))
    assert torch.equal(cache[:, :, 2], before[:, :, 1])
    assert torch.equal(cache[:, :, 1], before[:, :, 3])


def test_no_copies(kernels: Kernels) -> None:
    cache = torch.randn(2, 2, 4, 1, 16, 64)
    before = cache.clone()
    kernels.copy_blocks(KVPool(cache), torch.empty((0, 2), dtype=torch.int32))
    assert torch.equal(cache, before)
