"""Every kernel's time, and its share of what this machine can do.

    python tests/bench/kernels.py [--device cpu|cuda] [--dtype float32|bfloat16|float16] [--threads N] [--tiny]
                                  [--seconds N]

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
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

import torch
import torch.nn.functional as F
from roofline import Work, measure, measure_roofline
from torch import Tensor

from octavo.kernels.backend import Kernels, select_kernels
from octavo.kernels.cpu_environment import cpu_environment
from octavo.kernels.kv_cache import LARGEST, SCALE_BYTES, KVCache, KVPool, quantize_tokens
from octavo.kernels.quantized import Weight, quantize_fp8, quantize_int8
from octavo.kernels.sampling import SamplingTensors

NUM_QUERY_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCABULARY = 9, 3, 64, 576, 1536, 49152
"""SmolLM2-135M."""
BLOCK_SIZE = 16
NUM_CHOSEN = 4
"""Experts of a token."""


def main() -> None:
    args = parse_args()
    end_s = time.monotonic() + args.seconds
    if args.device == "cpu":
        become_a_worker(args.threads)
    torch.set_num_threads(args.threads)
    if args.device != "cpu":
        # Not for a CPU: with a default device torch looks at every call, which takes longer than a small kernel.
        torch.set_default_device(args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))
    kernels = select_kernels(torch.device(args.device))
    roofline = measure_roofline(dtype, tiny=args.tiny)
    conditions = describe(args, dtype, kernels)
    print(conditions)
    print(f"roofline: {roofline.gb_per_s:.1f} GB/s read, {roofline.gflop_per_s:.0f} GFLOP/s")
    repeats = (0.01,) if args.tiny else ()
    print(f"{'kernel':44} {'ms':>9} {'GB/s':>8} {'GFLOP/s':>9} {'of roofline':>11}")
    figures, left_out = [], []
    for work in all_works(kernels, dtype, args.device, tiny=args.tiny):
        if time.monotonic() > end_s:
            left_out.append(work.name)
            continue
        f = measure(work, roofline, *repeats)
        print(f"{f.name:44} {f.ms:9.4f} {f.gb_per_s:8.1f} {f.gflop_per_s:9.1f} {f.share:11.0%}", flush=True)
        figures.append(asdict(f))
    print(json.dumps({"conditions": conditions, **asdict(roofline), "kernels": figures, "left_out": left_out}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="bfloat16 on GPUs, float32 on CPUs")
    parser.add_argument("--tiny", action="store_true", help="a few small sizes, to see that everything runs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no kernel begins later")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def become_a_worker(num_threads: int) -> None:
    wanted = cpu_environment(num_threads)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def describe(args: argparse.Namespace, dtype: torch.dtype, kernels: Kernels) -> str:
    cpu = f"{args.threads} threads, {torch.backends.cpu.get_cpu_capability()}"
    where = torch.cuda.get_device_name() if args.device == "cuda" else cpu
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    return f"{kernels.name} kernels, {str(dtype)[6:]}, {where}, torch {torch.__version__}, {load}, SmolLM2-135M's sizes"


def all_works(kernels: Kernels, dtype: torch.dtype, device: str, *, tiny: bool) -> Iterator[Work]:
    """On a GPU with more sequences and longer ones, so that there is work for it."""
    many, long, chunk = (2, 64, 32) if tiny else (128, 4096, 2048) if device == "cuda" else (16, 1024, 512)
    sizes = [(1, 1, long), (many, 1, long), (1, 1, 8 * long), (1, chunk, chunk), (1, chunk, 2 * chunk)]
    for num_seqs, query_len, seq_len in sizes:
        work = attention_work(kernels, dtype, num_seqs, query_len, seq_len)
        yield work
        if device == "cpu":
            yield gathered_attention_work(work.name, dtype, num_seqs, query_len, seq_len)
        yield attention_work(kernels, dtype, num_seqs, query_len, seq_len, soft_cap=50.0)
        for kv_dtype in LARGEST if query_len == 1 else ():
            yield attention_work(kernels, dtype, num_seqs, query_len, seq_len, kv_dtype)
    for rows in (1, many, chunk):
        yield from row_works(kernels, dtype, rows)
    yield copy_work(kernels, dtype, num_copies=8)
    for rows in (1, 16) if not tiny else (2,):
        yield from sample_works(kernels, rows)
    for rows in (1, 4, 16, 64, 512) if not tiny else (2,):
        for size_in, size_out in [(HIDDEN, 2 * INTERMEDIATE), (HIDDEN, VOCABULARY)][: 1 if tiny else 2]:
            yield from linear_works(kernels, dtype, rows, size_in, size_out)
        yield from experts_works(kernels, dtype, rows)
        yield adapters_work(kernels, dtype, rows)


def attention_sizes(
    dtype: torch.dtype, num_seqs: int, query_len: int, seq_len: int, kv_dtype: torch.dtype | None = None
) -> tuple[float, float]:
    """Bytes of K, V, their scales, query and output; operations of the part of the score matrix that is visible."""
    visible = query_len * (seq_len - query_len) + query_len * (query_len + 1) / 2
    per_token = HEAD_DIM * dtype.itemsize if kv_dtype is None else HEAD_DIM * kv_dtype.itemsize + SCALE_BYTES
    num_bytes = 2 * seq_len * NUM_KV_HEADS * per_token + 2 * query_len * NUM_QUERY_HEADS * HEAD_DIM * dtype.itemsize
    return num_seqs * num_bytes, num_seqs * 4 * NUM_QUERY_HEADS * HEAD_DIM * visible


def attention_work(
    kernels: Kernels,
    dtype: torch.dtype,
    num_seqs: int,
    query_len: int,
    seq_len: int,
    kv_dtype: torch.dtype | None = None,
    soft_cap: float | None = None,
) -> Work:
    """``kv_dtype`` None: K and V as the query is."""
    blocks = seq_len // BLOCK_SIZE
    data = torch.randn(2, num_seqs * blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(dtype)
    if kv_dtype is None:
        layer = KVCache(data[0], data[1])
    else:
        values, scales = quantize_tokens(data, kv_dtype)
        layer = KVCache(values[0], values[1], scales[0], scales[1])
    tables = torch.randperm(num_seqs * blocks).view(num_seqs, blocks).int()
    lens = torch.full((num_seqs,), seq_len, dtype=torch.int32)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * query_len
    query = torch.randn(num_seqs * query_len, NUM_QUERY_HEADS, HEAD_DIM).to(dtype)
    limits = {"max_query_len": query_len, "max_seq_len": seq_len}
    scale = HEAD_DIM**-0.5

    def run() -> Tensor:
        return kernels.paged_attention(query, layer, tables, lens, starts, scale=scale, soft_cap=soft_cap, **limits)

    kind = "" if kv_dtype is None else f", {str(kv_dtype)[6:]} KV"
    kind += "" if soft_cap is None else ", soft cap"
    name = f"attention, {num_seqs} × {query_len} queries, {seq_len} keys{kind}"
    return Work(name, run, *attention_sizes(dtype, num_seqs, query_len, seq_len, kv_dtype))


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
    head_weights = torch.ones(2, HEAD_DIM, dtype=dtype)
    yield Work(
        f"norm_heads, {rows} rows",
        lambda: kernels.norm_heads(query, key, *head_weights, 1e-5),
        2 * (query.numel() + key.numel()) * size,
    )
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
        parameters = SamplingTensors(
            torch.full((rows,), temperature),
            torch.full((rows,), top_k, dtype=torch.int32),
            torch.full((rows,), top_p),
            torch.zeros(rows),
            torch.arange(rows),
            integers,
            integers,
            filters=top_k < VOCABULARY or top_p < 1.0,
        )
        yield Work(
            f"sample, {name}, {rows} rows",
            lambda parameters=parameters: kernels.sample(logits, parameters),  # type: ignore[misc]
            logits.numel() * 4,
        )
    token_ids = logits.argmax(dim=-1)
    for k in (0, 5, 20):
        yield Work(
            f"logprobs, k {k}, {rows} rows",
            lambda k=k: kernels.logprobs(logits, token_ids, k),  # type: ignore[misc]
            logits.numel() * 4,
        )


def linear_works(kernels: Kernels, dtype: torch.dtype, rows: int, size_in: int, size_out: int) -> Iterator[Work]:
    """Quantised weights are held against the roofline of plain numbers: at many rows they may pass it."""
    weight, x = torch.randn(size_out, size_in).to(dtype), torch.randn(rows, size_in).to(dtype)
    size, operations = f"{rows} rows, {size_in} × {size_out}", 2 * rows * weight.numel()
    in_and_out = (x.numel() + rows * size_out) * dtype.itemsize
    weights: dict[str, Weight] = {"": weight, ", int8": quantize_int8(weight)}
    if weight.is_cuda:
        weights[", fp8"] = quantize_fp8(weight)
    for kind, each in weights.items():
        packed = kernels.prepare_linear(each)
        num_bytes = in_and_out + (weight.nbytes if isinstance(each, Tensor) else weight.numel() + 4 * size_out)
        yield Work(f"linear{kind}, {size}", lambda packed=packed: packed(x), num_bytes, operations)  # type: ignore[misc]
    yield Work(f"  torch: {size}", lambda: F.linear(x, weight), in_and_out + weight.nbytes, operations)


def experts_works(kernels: Kernels, dtype: torch.dtype, rows: int) -> Iterator[Work]:
    """Experts that are together four times a plain MLP; a token's have the size of that MLP, which is beside them."""
    columns = INTERMEDIATE // NUM_CHOSEN
    gate_up = torch.randn(4 * NUM_CHOSEN, 2 * columns, HIDDEN).to(dtype)
    down = torch.randn(4 * NUM_CHOSEN, HIDDEN, columns).to(dtype)
    x, logits = torch.randn(rows, HIDDEN).to(dtype), torch.randn(rows, 4 * NUM_CHOSEN).to(dtype)
    experts = kernels.prepare_experts(gate_up, down, num_chosen=NUM_CHOSEN, renormalise=True)
    operations, read = 2 * rows * 3 * HIDDEN * INTERMEDIATE, logits.topk(NUM_CHOSEN).indices.unique().numel()
    in_and_out, per_expert = 2 * x.nbytes, gate_up[0].nbytes + down[0].nbytes
    name = f"{rows} rows, {NUM_CHOSEN} of {4 * NUM_CHOSEN} × {columns}"
    yield Work(f"experts, {name}", lambda: experts(x, logits), in_and_out + read * per_expert, operations)
    first = kernels.prepare_linear(gate_up[:NUM_CHOSEN].flatten(0, 1))
    second = kernels.prepare_linear(torch.randn(HIDDEN, INTERMEDIATE).to(dtype))
    num_bytes = in_and_out + NUM_CHOSEN * per_expert
    yield Work(f"  plain MLP: {rows} rows", lambda: second(kernels.silu_mul(first(x))), num_bytes, operations)


def adapters_work(kernels: Kernels, dtype: torch.dtype, rows: int) -> Work:
    """Each row has another adapter than the one before: the least that rows can share."""
    num_slots, rank = 8, 16
    device = torch.get_default_device()
    product = kernels.prepare_adapters(num_slots, rank, HIDDEN, 2 * INTERMEDIATE, dtype=dtype, device=device)
    for slot in range(num_slots):
        product.load(slot, torch.randn(rank, HIDDEN), torch.zeros(2 * INTERMEDIATE, rank))
    x, out = torch.randn(rows, HIDDEN).to(dtype), torch.zeros(rows, 2 * INTERMEDIATE).to(dtype)
    grouped = kernels.group_rows((torch.arange(rows) % num_slots).int(), num_slots)
    per_slot = rank * (HIDDEN + 2 * INTERMEDIATE)
    num_bytes = x.nbytes + 2 * out.nbytes + min(rows, num_slots) * per_slot * dtype.itemsize
    name = f"adapters of rank {rank}, {rows} rows, {HIDDEN} × {2 * INTERMEDIATE}"
    return Work(name, lambda: product(x, out, grouped), num_bytes, 2 * rows * per_slot)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
