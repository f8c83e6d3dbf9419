"""A kernel's time beside the best that this machine could do: the roofline, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

REPEATS_S = 0.4
"""So long, or five times, a kernel is repeated on a CPU."""


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


def measure(work: Work, roofline: Roofline, repeats_s: float = REPEATS_S) -> Figure:
    ms = time_ms(work.run, repeats_s, capturable=work.capturable)
    share = roofline.best_ms(work) / ms
    return Figure(work.name, ms, work.num_bytes / ms / 1e6, work.num_operations / ms / 1e6, share)


def time_ms(run: Callable[[], object], repeats_s: float = REPEATS_S, *, capturable: bool = True) -> float:
    if torch.get_default_device().type == "cuda":
        from triton.testing import do_bench, do_bench_cudagraph

        return float(do_bench_cudagraph(run, rep=20) if capturable else do_bench(run, warmup=5, rep=20))
    for _ in range(3):
        run()
    times: list[float] = []
    end = time.perf_counter() + repeats_s
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 2000):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def measure_roofline(dtype: torch.dtype, *, tiny: bool) -> Roofline:
    """On a GPU with larger arrays; ``tiny``: with small ones, for a look at whether all runs."""
    on_gpu = torch.get_default_device().type == "cuda"
    num_bytes, size = (1 << 22, 256) if tiny else (1 << 30, 8192) if on_gpu else (1 << 28, 2048)
    array = torch.ones(num_bytes // 4, dtype=torch.float32)
    matrix = torch.randn(size, size).to(dtype)
    read_ms = time_ms(lambda: array.sum())
    product_ms = time_ms(lambda: matrix @ matrix)
    return Roofline(array.numel() * 4 / read_ms / 1e6, 2 * size**3 / product_ms / 1e6)
