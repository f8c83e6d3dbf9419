"""Triton kernels against the torch references on a GPU, at the sizes of serving. Needs torch and triton only.

    PYTHONPATH=.ci/types python tests/gpu/check_kernels.py

``tests/kernels`` has the small and odd shapes; ``tests/bench/kernels.py`` the times. Exit code 1 when anything differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from octavo.kernels.backend import Kernels, reference_kernels, triton_kernels
from octavo.kernels.kv_cache import KVCache, KVPool

BLOCK_SIZE = 16
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
HEADS = [(9, 3, 64), (32, 8, 128), (28, 4, 128), (12, 2, 80)]
"""(query heads, KV heads, head size): SmolLM2, Llama 3 8B, Qwen2.5 7B, and a size that is no power of two."""
BATCHES = {
    "decode": [(n * 97 % 4000, 1) for n in range(64)],
    "prefill": [(0, 1500), (0, 700)],
    "mixed": [(900, 1), (512, 300), (0, 64), (3000, 1), (17, 5)],
}
"""(tokens cached before, new tokens) of each sequence."""

Check = tuple[str, Callable[[Kernels], Tensor], float]


def main(device: str) -> int:
    torch.set_default_device(device)
    torch.manual_seed(0)
    failures = 0
    for name, run, tolerance in checks():
        wanted, actual = run(reference_kernels()).double(), run(triton_kernels()).double()
        difference = (wanted - actual).abs().max().item()
        passed = difference <= tolerance
        failures += not passed
        print(
            f"{'ok' if passed else 'FAILED':6} {name}: differs by {difference:.1e}, allowed {tolerance:.0e}", flush=True
        )
    print(f"{failures} failed")
    return 1 if failures else 0


def checks() -> Iterator[Check]:
    for dtype, tolerance in TOLERANCE.items():
        for name, seqs in BATCHES.items():
            for heads in HEADS:
                yield f"attention, {name}, {heads}, {dtype}", attention(seqs, *heads, dtype), tolerance
        yield f"write_kv, {dtype}", write_kv(dtype), 0.0
        yield f"copy_blocks, {dtype}", copy_blocks(dtype), 0.0
        yield from elementwise(dtype, 2 * tolerance)
    yield "sample, 64 rows of 128,256 logits", sample(), 0.0


def attention(
    seqs: list[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Callable[[Kernels], Tensor]:
    lens = [cached + new for cached, new in seqs]
    num_blocks = [-(-length // BLOCK_SIZE) for length in lens]
    cache = torch.randn(2, sum(num_blocks), num_kv_heads, BLOCK_SIZE, head_dim).to(dtype)
    order = torch.randperm(sum(num_blocks)).int().split(num_blocks)
    tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    for table, length in zip(order, lens, strict=True):
        # What the last block holds past the sequence's end was never written.
        cache[:, table[-1].long(), :, (length - 1) % BLOCK_SIZE + 1 :] = torch.nan
    starts = torch.tensor([0, *(new for _, new in seqs)]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), num_heads, head_dim).to(dtype)

    def run(kernels: Kernels) -> Tensor:
        return kernels.paged_attention(
            query,
            KVCache(cache[0], cache[1]),
            tables,
            torch.tensor(lens, dtype=torch.int32),
            starts,
            scale=head_dim**-0.5,
            max_query_len=max(new for _, new in seqs),
            max_seq_len=max(lens),
        )

    return run


def write_kv(dtype: torch.dtype) -> Callable[[Kernels], Tensor]:
    key, value = torch.randn(2, 3000, 8, 128).to(dtype)
    slots = torch.randperm(400 * BLOCK_SIZE)[:3000]
    slots[::7] = -1

    def run(kernels: Kernels) -> Tensor:
        cache = torch.zeros(2, 400, 8, BLOCK_SIZE, 128, dtype=dtype)
        kernels.write_kv(key, value, KVCache(cache[0], cache[1]), slots)
        return cache

    return run


def copy_blocks(dtype: torch.dtype) -> Callable[[Kernels], Tensor]:
    cache = torch.randn(32, 2, 64, 8, BLOCK_SIZE, 128).to(dtype)
    copies = torch.randperm(64)[:40].view(20, 2).int()

    def run(kernels: Kernels) -> Tensor:
        copied = cache.clone()
        kernels.copy_blocks(KVPool(copied), copies)
        return copied

    return run


def elementwise(dtype: torch.dtype, tolerance: float) -> Iterator[Check]:
    x, residual = torch.randn(2, 3000, 4096).to(dtype)
    weight = torch.rand(4096).to(dtype)
    yield f"rms_norm, {dtype}", lambda k: torch.cat(k.rms_norm(x, weight, 1e-5, residual.clone())), tolerance
    yield f"silu_mul, {dtype}", lambda k: k.silu_mul(x), tolerance
    query, key = torch.randn(3000, 32, 128).to(dtype), torch.randn(3000, 8, 128).to(dtype)
    angles = torch.rand(4096, 64) * 6.28
    positions, table = torch.randint(0, 4096, (3000,)), torch.cat((angles.cos(), angles.sin()), dim=1)
    yield (
        f"rotary, {dtype}",
        lambda k: torch.cat(k.rotary(query.clone(), key.clone(), positions, table), dim=1),
        tolerance,
    )


def sample() -> Callable[[Kernels], Tensor]:
    num_rows, vocab_size = 64, 128_256
    parameters = (
        torch.randn(num_rows, vocab_size) * 4,
        torch.linspace(0, 2, num_rows),
        torch.randint(1, 100, (num_rows,)).int(),
        torch.rand(num_rows),
        torch.randint(-(2**62), 2**62, (num_rows,)),
        torch.randint(0, 4, (num_rows,)).int(),
        torch.arange(num_rows).int(),
    )
    return lambda kernels: kernels.sample(*parameters)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
