"""Paged attention: decode in GB/s and % of the measured copy bandwidth, prefill in TFLOP/s and % of a matrix product.

    PYTHONPATH=.ci/types python tests/gpu/attention_speed.py [--device cpu --tiny] [--seconds N]

Heads are those of Llama 3 8B: 32 query heads, 8 KV heads, size 128; blocks of 16 tokens in random order. Decode's bytes
are K, V and scales of all tokens, once. Calls follow each other on different blocks, at least four times the cache's
size in all where memory suffices, so that what is measured is memory. Prefill counts the visible half of the scores,
and so does torch's own attention beside it, on K and V that lie in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from measuring import Limits, Report, free_bytes, time_ms
from torch import Tensor

from octavo.kernels.backend import Kernels, select_kernels
from octavo.kernels.kv_cache import LARGEST, KVCache, bytes_per_block

NUM_QUERY_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
SCALE = HEAD_DIM**-0.5
PAST_THE_CACHE = 512 << 20
"""Bytes that a round of calls reads at least: an H200's second-level cache has 60 MB."""
MOST_CALLS = 64


def main() -> None:
    report = Report.from_arguments(__doc__)
    kernels = select_kernels(report.device)
    dtype = torch.bfloat16 if report.on_gpu else torch.float32
    limits = Limits.measure(report, dtype)
    with torch.inference_mode():
        for kv_dtype in (dtype, torch.int8, torch.float8_e4m3fn):
            if report.has_time(f"decode, {kv_dtype} KV"):
                measure_decode(report, kernels, limits, dtype, kv_dtype)
        if report.has_time("prefill"):
            measure_prefill(report, kernels, limits, dtype)
    report.finish()


def measure_decode(report: Report, kernels: Kernels, limits: Limits, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    batches, contexts = ((1, 8, 64, 256), (1 << 10, 8 << 10, 64 << 10)) if not report.tiny else ((1, 4), (64, 256))
    block_bytes = bytes_per_block(1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, kv_dtype)
    fitting = int(0.9 * free_bytes(report.device)) // block_bytes
    sizes = [(batch, context) for context in contexts for batch in batches]
    wanted = max(max(batch * context for batch, context in sizes) // BLOCK_SIZE, PAST_THE_CACHE // block_bytes)
    with report.part(f"decode, {kv_dtype} KV"):
        cache = filled_cache(min(fitting, wanted), kv_dtype, report.device)
        for batch, context in sizes:
            name = f"decode, {_name(kv_dtype)} KV, {batch} x {context}"
            if batch * context // BLOCK_SIZE > cache.key.shape[0]:
                report.left_out.append(f"{name} (memory)")
            elif report.has_time(name):
                with report.part(name):
                    runs = list(decode_runs(kernels, cache, batch, context, dtype))
                    ms = time_ms(runs, report.device)
                    _show_rate(report, limits, name, ms, batch * context // BLOCK_SIZE * block_bytes)


def filled_cache(num_blocks: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """K and V of any content but NaN; a random number for every element would take long to make."""
    shape = (2, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    if dtype not in LARGEST:
        return KVCache(*torch.empty(shape, dtype=dtype, device=device).normal_())
    # 0 … 119 are finite numbers of fp8 too.
    data = torch.empty(shape, dtype=torch.int8, device=device).random_(0, 120).view(dtype)
    scales = torch.full(shape[:-1], 0.01, device=device)
    return KVCache(data[0], data[1], scales[0], scales[1])


def decode_runs(
    kernels: Kernels, cache: KVCache, batch: int, context: int, dtype: torch.dtype
) -> Iterator[Callable[[], Tensor]]:
    """Calls on different blocks, as many as the cache holds."""
    device, num_blocks = cache.key.device, batch * context // BLOCK_SIZE
    query = torch.randn(batch, NUM_QUERY_HEADS, HEAD_DIM, device=device).to(dtype)
    lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    blocks = torch.randperm(cache.key.shape[0], device=device).int()
    element_bytes = cache.key.element_size() * 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    enough = -(-PAST_THE_CACHE // (num_blocks * element_bytes))
    for part in blocks.split(num_blocks)[: min(enough, MOST_CALLS, blocks.numel() // num_blocks)]:
        limits = {"scale": SCALE, "max_query_len": 1, "max_seq_len": context}
        yield partial(kernels.paged_attention, query, cache, part.view(batch, -1), lens, starts, **limits)


def _show_rate(report: Report, limits: Limits, name: str, ms: float, num_bytes: int) -> None:
    gb_per_s = num_bytes / ms / 1e6
    share = gb_per_s / limits.copy_gb_per_s
    figures = {"us": round(ms * 1e3, 2), "gb_per_s": round(gb_per_s, 1), "of_copy": round(share, 3)}
    report.show(name, figures, f"{ms * 1e3:10.1f} us {gb_per_s:8.0f} GB/s {share:6.1%} of a copy")


def measure_prefill(report: Report, kernels: Kernels, limits: Limits, dtype: torch.dtype) -> None:
    """(sequences, new tokens, tokens before them)"""
    sizes = [(1, 2048, 0), (8, 2048, 0), (1, 8192, 0), (1, 32768, 0), (1, 2048, 30720)]
    for num_seqs, new, before in sizes if not report.tiny else [(2, 64, 0), (1, 32, 96)]:
        name = f"prefill, {num_seqs} x {new} after {before}"
        if not report.has_time(name):
            continue
        with report.part(name):
            visible = num_seqs * (new * before + new * (new + 1) / 2)
            operations = 4 * NUM_QUERY_HEADS * HEAD_DIM * visible
            run = prefill_run(kernels, num_seqs, new, before, dtype, report.device)
            _show_operations(report, limits, name, time_ms([run], report.device), operations)
        if before == 0:
            with report.part(f"  torch: {name}"):
                ms = time_ms([torch_run(num_seqs, new, dtype, report.device)], report.device)
                _show_operations(report, limits, f"  torch: {name}", ms, operations)


def prefill_run(
    kernels: Kernels, num_seqs: int, new: int, before: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    length = new + before
    num_blocks = num_seqs * length // BLOCK_SIZE
    cache = filled_cache(num_blocks, dtype, device)
    query = torch.randn(num_seqs * new, NUM_QUERY_HEADS, HEAD_DIM, device=device).to(dtype)
    tables = torch.randperm(num_blocks, device=device).int().view(num_seqs, -1)
    lens = torch.full((num_seqs,), length, dtype=torch.int32, device=device)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * new
    return lambda: kernels.paged_attention(
        query, cache, tables, lens, starts, scale=SCALE, max_query_len=new, max_seq_len=length
    )


def torch_run(num_seqs: int, length: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    query = torch.randn(num_seqs, NUM_QUERY_HEADS, length, HEAD_DIM, device=device).to(dtype)
    key, value = torch.randn(2, num_seqs, NUM_KV_HEADS, length, HEAD_DIM, device=device).to(dtype)
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _show_operations(report: Report, limits: Limits, name: str, ms: float, operations: float) -> None:
    rate = operations / ms / 1e9
    share = rate / limits.product_tflop_per_s
    figures = {"ms": round(ms, 4), "tflop_per_s": round(rate, 3), "of_product": round(share, 3)}
    report.show(name, figures, f"{ms:10.3f} ms {rate:8.2f} TFLOP/s {share:6.1%} of a product")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
