"""Triton kernels against the torch references on a GPU, at the sizes of serving. Needs torch and triton only.

    PYTHONPATH=.ci/types python tests/gpu/check_kernels.py [--device cpu --tiny] [--seconds N]

``tests/kernels`` has the small and odd shapes. On a CPU the kernels are interpreted, at small sizes. A difference is
the largest one, over the largest number that the reference gives or 1.
"""

from __future__ import annotations

import os
import sys

if "cpu" in sys.argv:  # Triton looks at it when it is first imported
    os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from measuring import Report
from torch import Tensor

from octavo.kernels.backend import Kernels, reference_kernels, triton_kernels
from octavo.kernels.kv_cache import LARGEST, KVCache, KVPool, quantize_tokens
from octavo.kernels.quantized import Int4Weight, Weight, quantize_fp8, quantize_int8
from octavo.kernels.sampling import LogitBias, Penalties, SamplingTensors, TokenRuns

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
LLAMA, SMOLLM, QWEN, ODD = (32, 8, 128), (9, 3, 64), (28, 4, 128), (12, 2, 80)
"""(query heads, KV heads, head size): Llama 3 8B, SmolLM2, Qwen2.5 7B, and a size that is no power of two."""

Check = tuple[str, Callable[[Kernels], Tensor], float]


@dataclass(frozen=True)
class Batch:
    """(tokens cached before, new tokens) of each sequence, and rows of padding as a graph of decoding has them."""

    seqs: list[tuple[int, int]]
    num_padding_rows: int = 0


SERVING = {
    "decode": Batch([(n * 97 % 4000, 1) for n in range(64)]),
    "padded decode": Batch([(n * 97 % 4000, 1) for n in range(13)], num_padding_rows=3),
    "long decode": Batch([(30_000, 1), (11, 1), (9_000, 1)]),
    "prefill": Batch([(0, 1500), (0, 700)]),
    "mixed": Batch([(900, 1), (512, 300), (0, 64), (3000, 1), (17, 5)]),
}
TINY = {
    "decode": Batch([(40, 1), (7, 1)]),
    "padded decode": Batch([(40, 1), (7, 1)], num_padding_rows=2),
    "long decode": Batch([(600, 1)]),
    "mixed": Batch([(20, 1), (16, 9), (0, 33)]),
}


def main() -> None:
    report = Report.from_arguments(__doc__)
    torch.set_default_device(report.device)
    torch.manual_seed(0)
    kernels, reference, num_passed = triton_kernels(), reference_kernels(), 0
    # Attention, which takes the longest to compile, comes last.
    for make in (elementwise_checks, cache_checks, sample_checks, product_checks, attention_checks):
        with report.part(make.__name__):
            for check in make(report.tiny):
                if report.has_time(check[0]):
                    num_passed += passes(report, check, kernels, reference)
    report.show("kernels checked", num_passed, f"{num_passed} checks passed")
    report.finish()


@torch.inference_mode()
def passes(report: Report, check: Check, kernels: Kernels, reference: Kernels) -> bool:
    name, run, tolerance = check
    with report.part(name):
        wanted, actual = run(reference).double(), run(kernels).double()
        difference = ((wanted - actual).abs().max() / wanted.abs().max().clamp(min=1.0)).item()
        passed = difference <= tolerance  # not if it is no number
        verdict = "ok" if passed else "FAILED"
        print(f"{verdict:6} {name}: differs by {difference:.1e}, allowed {tolerance:.0e}", flush=True)
        if not passed:
            raise RuntimeError(f"differs by {difference:.1e}, allowed {tolerance:.0e}")
        return True
    return False


# ---- attention ----


def attention_checks(tiny: bool) -> Iterator[Check]:
    batches = TINY if tiny else SERVING
    for batch_name, batch in batches.items():
        for heads in (LLAMA, SMOLLM, ODD) if not tiny else (SMOLLM,):
            yield attention(batch_name, batch, heads, torch.bfloat16)
        for kv_dtype in (torch.int8, torch.float8_e4m3fn):
            heads = SMOLLM if tiny else LLAMA
            yield attention(batch_name, batch, heads, torch.bfloat16, kv_dtype=kv_dtype)
    for batch_name in ("decode", "mixed"):
        batch, window = batches[batch_name], 24 if tiny else 1000
        heads = SMOLLM if tiny else LLAMA
        yield attention(batch_name, batch, heads, torch.bfloat16, sliding_window=window)
        yield attention(batch_name, batch, heads, torch.bfloat16, soft_cap=30.0)
        yield attention(batch_name, batch, heads, torch.bfloat16, block_size=128)
        yield invariance(batch_name, batch)
        if not tiny:
            yield attention(batch_name, batch, QWEN, torch.float16)
            yield attention(batch_name, batch, SMOLLM, torch.float32)


def attention(
    name: str,
    batch: Batch,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    kv_dtype: torch.dtype | None = None,
    block_size: int = 16,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    only_first: bool = False,
) -> Check:
    """What the last block holds past a sequence's end was never written: NaN, or its scale is.

    ``only_first``: of the same sequences, only the first is in the call.
    """
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim = heads
    lens = [cached + new for cached, new in batch.seqs]
    num_blocks = [-(-length // block_size) for length in lens]
    data = torch.randn(2, sum(num_blocks), num_kv_heads, block_size, head_dim).to(dtype)
    order = torch.randperm(sum(num_blocks)).int().split(num_blocks)
    tables = torch.nn.utils.rnn.pad_sequence([*order, *[torch.zeros(1).int()] * batch.num_padding_rows], True)
    cache, unwritten = cache_of(data, kv_dtype)
    for table, length in zip(order, lens, strict=True):
        unwritten[:, table[-1].long(), :, (length - 1) % block_size + 1 :] = torch.nan
    padding = batch.num_padding_rows
    starts = torch.tensor([0, *(new for _, new in batch.seqs)]).cumsum(0).int()
    num_tokens = int(starts[-1])
    starts = torch.cat((starts, starts[-1:].repeat(padding)))
    query = torch.randn(num_tokens + padding, num_heads, head_dim).to(dtype)
    seq_lens = torch.tensor([*lens, *[0] * padding], dtype=torch.int32)
    if only_first:
        num_tokens = batch.seqs[0][1]
        query, tables, seq_lens, starts = query[:num_tokens], tables[:1], seq_lens[:1], starts[:2]

    def run(kernels: Kernels) -> Tensor:
        attended = kernels.paged_attention(
            query,
            cache,
            tables,
            seq_lens,
            starts,
            scale=head_dim**-0.5,
            max_query_len=int(starts.diff().max()),
            max_seq_len=int(seq_lens.max()),
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
        return attended[:num_tokens]

    details = f"window {sliding_window}, cap {soft_cap}, blocks of {block_size}, KV {kv_dtype or 'the same'}"
    return f"attention, {name}, {heads}, {dtype}, {details}", run, TOLERANCE[dtype]


def cache_of(data: Tensor, kv_dtype: torch.dtype | None) -> tuple[KVCache, Tensor]:
    """The cache, and where NaN can be written to it."""
    if kv_dtype is None:
        return KVCache(data[0], data[1]), data
    values, scales = quantize_tokens(data, kv_dtype)
    return KVCache(values[0], values[1], scales[0], scales[1]), scales


def invariance(name: str, batch: Batch) -> Check:
    """The first sequence alone and in its batch: the same bits."""
    _, run, _ = attention(name, batch, LLAMA, torch.bfloat16)
    _, alone, _ = attention(name, batch, LLAMA, torch.bfloat16, only_first=True)
    count = batch.seqs[0][1]

    def difference(kernels: Kernels) -> Tensor:
        if kernels.name == "reference":
            return torch.zeros(count, *LLAMA[::2])
        invariant = triton_kernels(batch_invariant=True)
        return run(invariant)[:count] - alone(invariant)

    return f"batch invariance, {name}", difference, 0.0


# ---- the cache ----


def cache_checks(tiny: bool) -> Iterator[Check]:
    for dtype in (torch.bfloat16, torch.float32):
        yield write_kv(dtype, None, tiny)
        for kv_dtype in LARGEST:
            yield write_kv(dtype, kv_dtype, tiny)
    for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        yield copy_blocks(dtype, tiny)


def write_kv(dtype: torch.dtype, kv_dtype: torch.dtype | None, tiny: bool) -> Check:
    """Every seventh token is padding. Values of a quantised cache are compared with their scales in them; one step of
    fp8 is an eighth."""
    count, heads, dim, blocks = (50, 2, 32, 8) if tiny else (3000, 8, 128, 400)
    key, value = torch.randn(2, count, heads, dim).to(dtype)
    slots = torch.randperm(blocks * 16)[:count].int()
    slots[::7] = -1

    def run(kernels: Kernels) -> Tensor:
        pool = KVPool.allocate(1, blocks, heads, 16, dim, kv_dtype or dtype, key.device)
        for tensor in pool.tensors():
            tensor.zero_()
        (cache,) = pool.layers()
        kernels.write_kv(key, value, cache, slots)
        if pool.scales is None:
            return pool.data
        return pool.data.float() * pool.scales[..., None]

    tolerance = {None: 0.0, torch.int8: 1e-2, torch.float8_e4m3fn: 0.07}[kv_dtype]
    return f"write_kv, {dtype}, KV {kv_dtype or 'the same'}", run, tolerance


def copy_blocks(dtype: torch.dtype, tiny: bool) -> Check:
    layers, blocks = (2, 16) if tiny else (32, 64)
    pool = KVPool.allocate(layers, blocks, 8, 16, 128 if not tiny else 32, dtype, torch.get_default_device())
    for tensor in pool.tensors():
        tensor.copy_(torch.randint(0, 100, tensor.shape))
    copies = torch.randperm(blocks)[: blocks // 2].view(-1, 2).int()

    def run(kernels: Kernels) -> Tensor:
        copied = KVPool(pool.data.clone(), None if pool.scales is None else pool.scales.clone())
        kernels.copy_blocks(copied, copies)
        return torch.cat([tensor.flatten().float() for tensor in copied.tensors()])

    return f"copy_blocks, {dtype}", run, 0.0


# ---- products ----


def product_checks(tiny: bool) -> Iterator[Check]:
    size_in, size_out = (256, 96) if tiny else (4096, 6144)
    plain = torch.randn(size_out, size_in)
    weights: dict[str, Weight] = {
        "bfloat16": plain.bfloat16(),
        "int8": quantize_int8(plain),
        "fp8": quantize_fp8(plain),
        "int4": random_int4(size_out, size_in, permuted=False),
        "int4, permuted": random_int4(size_out, size_in, permuted=True),
    }
    for name, weight in weights.items():
        for num_rows in (1, 17, 64, 1000) if not tiny else (1, 17):
            x = torch.randn(num_rows, size_in).bfloat16()
            yield (
                f"product, {name}, {num_rows} rows",
                lambda k, weight=weight, x=x: k.prepare_linear(weight)(x),
                TOLERANCE[torch.bfloat16],
            )


def random_int4(size_out: int, size_in: int, *, permuted: bool) -> Int4Weight:
    packed = torch.randint(256, (size_out, size_in // 2)).to(torch.uint8)
    scales = torch.rand(size_out, size_in // 64).half() / 8
    return Int4Weight(packed, scales, -8 * scales, torch.randperm(size_in) if permuted else None)


# ---- sampling ----


def sample_checks(tiny: bool) -> Iterator[Check]:
    num_rows, vocab_size = (5, 700) if tiny else (64, 128_256)
    logits = torch.randn(num_rows, vocab_size) * 4
    how = SamplingTensors(
        temperature=torch.linspace(0, 2, num_rows),
        top_k=torch.full((num_rows,), vocab_size).int(),
        top_p=torch.ones(num_rows),
        min_p=torch.zeros(num_rows),
        seeds=torch.randint(-(2**62), 2**62, (num_rows,)),
        branches=torch.randint(0, 4, (num_rows,)).int(),
        positions=torch.arange(num_rows).int(),
        filters=False,
    )
    filtered = replace(
        how,
        top_k=torch.randint(1, 100, (num_rows,)).int(),
        top_p=torch.rand(num_rows),
        min_p=torch.rand(num_rows) / 10,
        filters=True,
    )
    edited = replace(filtered, banned=runs(num_rows, vocab_size, 3), penalties=penalties(num_rows, vocab_size))
    masked = replace(edited, bias=bias(num_rows, vocab_size), allowed=random_masks(num_rows, vocab_size))
    broken = logits.clone()
    broken[1, 5], broken[2, :] = torch.nan, -torch.inf
    for name, rows, each in [
        ("without filters", logits, how),
        ("top-k, top-p, min-p", logits, filtered),
        ("penalties and banned tokens", logits, edited),
        ("bias and allowed tokens too", logits, masked),
        ("NaN and nothing", broken, filtered),
    ]:
        title = f"sample, {name}, {num_rows} x {vocab_size}"
        yield f"{title}, tokens", lambda k, rows=rows, each=each: k.sample(rows.clone(), each), 0.0
    token_ids = torch.randint(-1, vocab_size, (num_rows,))
    for name, rows in [("", logits), (" of many equals", logits.bfloat16().float()), (" of NaN and nothing", broken)]:
        for top in (0, 5, 20):
            title = f"{top} log-probabilities{name}, {num_rows} x {vocab_size}"
            yield f"{title}, ids and ranks", lambda k, a=(rows, token_ids, top): ids_and_ranks(k, *a), 0.0
            yield f"{title}, values", lambda k, a=(rows, token_ids, top): logprob_values(k, *a), 1e-5


def ids_and_ranks(kernels: Kernels, logits: Tensor, token_ids: Tensor, top: int) -> Tensor:
    found = kernels.logprobs(logits, token_ids, top)
    return torch.cat((found.ranks[:, None], found.top_token_ids), dim=1)


def logprob_values(kernels: Kernels, logits: Tensor, token_ids: Tensor, top: int) -> Tensor:
    """What there is none of is NaN, here 1."""
    found = kernels.logprobs(logits, token_ids, top)
    return torch.cat((found.logprobs[:, None], found.top_logprobs), dim=1).nan_to_num(1.0)


def runs(num_rows: int, vocab_size: int, most: int) -> TokenRuns:
    counts = torch.randint(0, most + 1, (num_rows,)).tolist()
    tokens = [torch.randperm(vocab_size)[:count] for count in counts]
    return TokenRuns(torch.cat(tokens).int(), torch.tensor([0, *counts]).cumsum(0).int())


def penalties(num_rows: int, vocab_size: int) -> Penalties:
    seen = runs(num_rows, vocab_size, min(500, vocab_size))
    return Penalties(
        seen,
        torch.randint(0, 4, seen.tokens.shape).int(),
        repetition=1 + torch.rand(num_rows),
        frequency=torch.rand(num_rows),
        presence=torch.rand(num_rows),
    )


def bias(num_rows: int, vocab_size: int) -> LogitBias:
    biased = runs(num_rows, vocab_size, min(300, vocab_size))
    return LogitBias(biased, 5 * torch.randn(biased.tokens.shape))


def random_masks(num_rows: int, vocab_size: int) -> Tensor:
    """Every third row allows everything, every third half, every third nothing but the first 32."""
    masks = torch.randint(-(2**31), 2**31, (num_rows, -(-vocab_size // 32))).int()
    masks[::3], masks[1::3, 1:], masks[1::3, 0] = -1, 0, -1
    return masks


# ---- the rest ----


def elementwise_checks(tiny: bool) -> Iterator[Check]:
    rows, size = (7, 96) if tiny else (3000, 4096)
    for dtype, tolerance in TOLERANCE.items():
        x, residual = torch.randn(2, rows, size).to(dtype)
        weight = torch.rand(size).to(dtype)
        query, key = torch.randn(rows, 32, 128).to(dtype), torch.randn(rows, 8, 128).to(dtype)
        head_weights = torch.rand(2, 128)  # float32, as Gemma's
        angles = torch.rand(4096, 64) * 6.28
        positions, table = torch.randint(0, 4096, (rows,)).int(), torch.cat((angles.cos(), angles.sin()), dim=1)
        runs_of: dict[str, Callable[[Kernels], Tensor]] = {
            "rms_norm": lambda k, x=x, w=weight, r=residual: torch.cat(k.rms_norm(x, w, 1e-5, r.clone())),
            "silu_mul": lambda k, x=x: k.silu_mul(x),
            "gelu_mul": lambda k, x=x: k.gelu_mul(x),
            "gelu_erf_mul": lambda k, x=x: k.gelu_erf_mul(x),
            "rotary": lambda k, q=query, key=key, p=positions, t=table: torch.cat(
                k.rotary(q.clone(), key.clone(), p, t), dim=1
            ),
        }
        half = table[:, 32:96].contiguous()
        runs_of["rotary of half a head"] = lambda k, q=query, key=key, p=positions, t=half: torch.cat(
            k.rotary(q.clone(), key.clone(), p, t), dim=1
        )
        runs_of["norm_heads"] = lambda k, q=query, key=key, w=head_weights: torch.cat(
            k.norm_heads(q.clone(), key.clone(), *w, 1e-5), dim=1
        )
        for name, run in runs_of.items():
            yield f"{name}, {dtype}", run, 2 * tolerance


if __name__ == "__main__":
    main()
