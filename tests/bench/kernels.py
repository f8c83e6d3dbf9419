"""Every kernel's time, and its share of what this machine can do.

    python tests/bench/kernels.py [--device cpu|cuda] [--dtype float32|bfloat16|float16] [--threads N]

The roofline is measured in the same run: the bandwidth at which a large array is read (its sum), and the rate of a
large matrix product. A kernel's best possible time is the larger of its bytes over the one and its operations over the
other; its share is that time over its own. Small kernels run from a CPU's caches and can pass 100 % of memory's
bandwidth. Bytes are what must be read and written once; operations count a multiplication and an addition as two. Times
are the median of repeated calls, warm; on a GPU those of a captured graph, so launches from Python are not in them. On
a CPU the process restarts itself in the environment of a worker. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.backend import Kernels, select_kernels
from octavo.kernels.cpu_environment import cpu_environment
from octavo.kernels.kv_cache import KVCache, KVPool

NUM_QUERY_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCABULARY = 9, 3, 64, 576, 1536, 49152
"""SmolLM2-135M."""
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Work:
    name: str
    run: Callable[[], object]
    num_bytes: float
    num_operations: float = 0.0
    capturable: bool = True


@dataclass(frozen=True)
class Roofline:
    gb_per_s: float
    gflop_per_s: float

    def best_ms(self, work: Work) -> float:
        return max(work.num_bytes / self.gb_per_s, work.num_operations / self.gflop_per_s) / 1e6


@dataclass(frozen=True)
class Figure:
    name: str
    ms: float
    gb_per_s: float
    gflop_per_s: float
    share: float


def main() -> None:
    args = parse_args()
    if args.device == "cpu":
        become_a_worker(args.threads)
    torch.set_num_threads(args.threads)
    if args.device != "cpu":
        # Not for a CPU: with a default device torch looks at every call, which takes longer than a small kernel.
        torch.set_default_device(args.device)
    dtype = getattr(torch, args.dtype)
    kernels = select_kernels(torch.device(args.device))
    roofline = measure_roofline(dtype)
    conditions = describe(args, kernels)
    print(conditions)
    print(f"roofline: {roofline.gb_per_s:.1f} GB/s read, {roofline.gflop_per_s:.0f} GFLOP/s")
    figures = [measure(work, roofline) for work in all_works(kernels, dtype, args.device)]
    print(f"{'kernel':44} {'ms':>9} {'GB/s':>8} {'GFLOP/s':>9} {'of roofline':>11}")
    for f in figures:
        print(f"{f.name:44} {f.ms:9.4f} {f.gb_per_s:8.1f} {f.gflop_per_s:9.1f} {f.share:11.0%}")
    print(json.dumps({"conditions": conditions, **asdict(roofline), "kernels": [asdict(f) for f in figures]}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def become_a_worker(num_threads: int) -> None:
    wanted = cpu_environment(num_threads)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def describe(args: argparse.Namespace, kernels: Kernels) -> str:
    cpu = f"{args.threads} threads, {torch.backends.cpu.get_cpu_capability()}"
    where = torch.cuda.get_device_name() if args.device == "cuda" else cpu
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    return f"{kernels.name} kernels, {args.dtype}, {where}, torch {torch.__version__}, {load}, SmolLM2-135M's sizes"


def measure(work: Work, roofline: Roofline) -> Figure:
    ms = time_ms(work.run, capturable=work.capturable)
    share = roofline.best_ms(work) / ms
    return Figure(work.name, ms, work.num_bytes / ms / 1e6, work.num_operations / ms / 1e6, share)


def time_ms(run: Callable[[], object], *, capturable: bool = True) -> float:
    if torch.get_default_device().type == "cuda":
        from triton.testing import do_bench, do_bench_cudagraph

        return float(do_bench_cudagraph(run, rep=20) if capturable else do_bench(run, warmup=5, rep=20))
    for _ in range(3):
        run()
    times: list[float] = []
    end = time.perf_counter() + 0.4
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 2000):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def measure_roofline(dtype: torch.dtype) -> Roofline:
    on_gpu = torch.get_default_device().type == "cuda"
    array = torch.ones((1 << 30 if on_gpu else 1 << 28) // 4, dtype=torch.float32)
    size = 8192 if on_gpu else 2048
    matrix = torch.randn(size, size).to(dtype)
    read_ms = time_ms(lambda: array.sum())
    product_ms = time_ms(lambda: matrix @ matrix)
    return Roofline(array.numel() * 4 / read_ms / 1e6, 2 * size**3 / product_ms / 1e6)


def all_works(kernels: Kernels, dtype: torch.dtype, device: str) -> Iterator[Work]:
    """On a GPU with more sequences and longer ones, so that there is work for it."""
    many, long, chunk = (128, 4096, 2048) if device == "cuda" else (16, 1024, 512)
    for num_seqs, query_len, seq_len in [(1, 1, long), (many, 1, long), (1, chunk, chunk), (1, chunk, 2 * chunk)]:
        work = attention_work(kernels, dtype, num_seqs, query_len, seq_len)
        yield work
        if device == "cpu":
            yield gathered_attention_work(work.name, dtype, num_seqs, query_len, seq_len)
    for rows in (1, many, chunk):
        yield from row_works(kernels, dtype, rows)
    yield copy_work(kernels, dtype, num_copies=8)
    for rows in (1, 16):
        yield from sample_works(kernels, rows)
    for rows in (1, 4, 16, 64, 512):
        for size_in, size_out in [(HIDDEN, 2 * INTERMEDIATE), (HIDDEN, VOCABULARY)]:
            yield from linear_works(kernels, dtype, rows, size_in, size_out)


def attention_sizes(dtype: torch.dtype, num_seqs: int, query_len: int, seq_len: int) -> tuple[float, float]:
    """Bytes of K, V, query and output; operations of the part of the score matrix that is visible."""
    visible = query_len * (seq_len - query_len) + query_len * (query_len + 1) / 2
    elements = 2 * seq_len * NUM_KV_HEADS + 2 * query_len * NUM_QUERY_HEADS
    return num_seqs * elements * HEAD_DIM * dtype.itemsize, num_seqs * 4 * NUM_QUERY_HEADS * HEAD_DIM * visible


def attention_work(kernels: Kernels, dtype: torch.dtype, num_seqs: int, query_len: int, seq_len: int) -> Work:
    blocks = seq_len // BLOCK_SIZE
    cache = torch.randn(2, num_seqs * blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(dtype)
    tables = torch.randperm(num_seqs * blocks).view(num_seqs, blocks).int()
    lens = torch.full((num_seqs,), seq_len, dtype=torch.int32)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * query_len
    query = torch.randn(num_seqs * query_len, NUM_QUERY_HEADS, HEAD_DIM).to(dtype)
    layer = KVCache(cache[0], cache[1])
    limits = {"max_query_len": query_len, "max_seq_len": seq_len}

    def run() -> Tensor:
        return kernels.paged_attention(query, layer, tables, lens, starts, scale=HEAD_DIM**-0.5, **limits)

    name = f"attention, {num_seqs} × {query_len} queries, {seq_len} keys"
    return Work(name, run, *attention_sizes(dtype, num_seqs, query_len, seq_len))


def gathered_attention_work(name: str, dtype: torch.dtype, num_seqs: int, query_len: int, seq_len: int) -> Work:
    """What it replaces: K and V of all sequences gathered, then torch's attention."""
    blocks = seq_len // BLOCK_SIZE
    cache = torch.randn(2, num_seqs * blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(dtype)
    tables = torch.randperm(num_seqs * blocks)
    query = torch.randn(num_seqs, NUM_QUERY_HEADS, query_len, HEAD_DIM).to(dtype)
    mask = torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len)

    def gather(part: Tensor) -> Tensor:
        tiles = part[tables].view(num_seqs, blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        return tiles.transpose(1, 2).reshape(num_seqs, NUM_KV_HEADS, seq_len, HEAD_DIM)

    def run() -> Tensor:
        return F.scaled_dot_product_attention(
            query, gather(cache[0]), gather(cache[1]), attn_mask=mask, enable_gqa=True
        )

    return Work(f"  gather + torch: {name[11:]}", run, *attention_sizes(dtype, num_seqs, query_len, seq_len))


def row_works(kernels: Kernels, dtype: torch.dtype, rows: int) -> Iterator[Work]:
    size = dtype.itemsize
    x, residual = torch.randn(2, rows, HIDDEN).to(dtype)
    weight = torch.ones(HIDDEN, dtype=dtype)
    yield Work(
        f"rms_norm + residual, {rows} rows",
        lambda: kernels.rms_norm(x, weight, 1e-5, residual),
        4 * x.numel() * size,
    )
    query = torch.randn(rows, NUM_QUERY_HEADS, HEAD_DIM).to(dtype)
    key, value = torch.randn(2, rows, NUM_KV_HEADS, HEAD_DIM).to(dtype)
    # An angle of 0: in place, again and again, the numbers neither grow nor vanish.
    table = torch.cat((torch.ones(rows, HEAD_DIM // 2), torch.zeros(rows, HEAD_DIM // 2)), dim=1)
    positions = torch.arange(rows)
    yield Work(
        f"rotary, {rows} rows",
        lambda: kernels.rotary(query, key, positions, table),
        2 * (query.numel() + key.numel()) * size + table.numel() * 4,
    )
    cache = torch.zeros(2, rows, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype)
    slots = torch.randperm(rows * BLOCK_SIZE)[:rows]
    yield Work(
        f"write_kv, {rows} rows",
        lambda: kernels.write_kv(key, value, KVCache(cache[0], cache[1]), slots),
        4 * key.numel() * size,
    )
    gate_up = torch.randn(rows, 2 * INTERMEDIATE).to(dtype)
    yield Work(f"silu_mul, {rows} rows", lambda: kernels.silu_mul(gate_up), 1.5 * gate_up.numel() * size)


def copy_work(kernels: Kernels, dtype: torch.dtype, num_copies: int) -> Work:
    cache = torch.zeros(30, 2, 2 * num_copies, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype)
    copies = torch.arange(2 * num_copies, dtype=torch.int32).view(2, num_copies).T.contiguous()
    name = f"copy_blocks, {num_copies} blocks, 30 layers"
    return Work(name, lambda: kernels.copy_blocks(KVPool(cache), copies), cache.numel() * dtype.itemsize)


def sample_works(kernels: Kernels, rows: int) -> Iterator[Work]:
    logits = 3 * torch.randn(rows, VOCABULARY)
    integers = torch.zeros(rows, dtype=torch.int32)
    for name, temperature, top_k, top_p in [
        ("greedy", 0.0, VOCABULARY, 1.0),
        ("temperature", 1.0, VOCABULARY, 1.0),
        ("top_k 50, top_p 0.9", 0.7, 50, 0.9),
        ("top_p 0.9", 0.7, VOCABULARY, 0.9),
    ]:
        parameters = (
            torch.full((rows,), temperature),
            torch.full((rows,), top_k, dtype=torch.int32),
            torch.full((rows,), top_p),
            torch.arange(rows),
            integers,
            integers,
        )
        # Whether a row is filtered is asked of the device, which a graph cannot do.
        yield Work(
            f"sample, {name}, {rows} rows",
            lambda parameters=parameters: kernels.sample(logits, *parameters),  # type: ignore[misc]
            logits.numel() * 4,
            capturable=False,
        )


def linear_works(kernels: Kernels, dtype: torch.dtype, rows: int, size_in: int, size_out: int) -> Iterator[Work]:
    weight = torch.randn(size_out, size_in).to(dtype)
    x = torch.randn(rows, size_in).to(dtype)
    packed = kernels.prepare_linear(weight)
    num_bytes = (weight.numel() + x.numel() + rows * size_out) * dtype.itemsize
    name = f"linear, {rows} rows, {size_in} × {size_out}"
    yield Work(name, lambda: packed(x), num_bytes, 2 * rows * weight.numel())
    yield Work(f"  torch: {name[8:]}", lambda: F.linear(x, weight), num_bytes, 2 * rows * weight.numel())


if __name__ == "__main__":
    with torch.inference_mode():
        main()
