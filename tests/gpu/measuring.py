"""What the GPU scripts share: a budget of seconds, parts that may fail alone, times and this machine's limits.

A script is a list of named parts. One that raises is reported, and the rest still runs; one that would begin after the
budget is left out, and said to be. The last line is JSON: figures, what failed, what was left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Report:
    """Of one script."""

    device: torch.device
    tiny: bool
    """Small sizes, to see that everything runs."""
    end_s: float
    figures: dict[str, object] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def from_arguments(cls, about: str | None) -> Report:
        parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
        parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs")
        parser.add_argument("--seconds", type=float, default=480.0, help="no part begins later")
        args = parser.parse_args()
        if args.device == "cpu":
            torch.set_num_threads(1)  # it is not about times there
        return cls(torch.device(args.device), args.tiny, time.monotonic() + args.seconds)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What raises in it is noted under ``name``."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            if self.on_gpu:
                torch.cuda.empty_cache()

    def has_time(self, name: str, needed_s: float = 0.0) -> bool:
        """Whether a part of ``needed_s`` may begin; else it is noted as left out."""
        has_time = time.monotonic() + needed_s < self.end_s
        if not has_time:
            self.left_out.append(name)
        return has_time

    def show(self, name: str, value: object, text: str) -> None:
        """A figure, for the last line and for people."""
        self.figures[name] = value
        print(f"{name:56} {text}", flush=True)

    def finish(self) -> None:
        """Print the last line and end the process: with 1 when something failed."""
        for line in self.failed:
            print(f"FAILED  {line}")
        if self.left_out:
            print(f"left out for lack of time: {', '.join(self.left_out)}")
        print(json.dumps({"figures": self.figures, "failed": self.failed, "left_out": self.left_out}), flush=True)
        sys.exit(1 if self.failed else 0)


def time_ms(runs: list[Callable[[], object]], device: torch.device, repeats: int = 10) -> float:
    """Milliseconds of one of ``runs``, which are carried out one after the other: median of ``repeats`` rounds.

    On a GPU a round is a captured graph, so launches from Python are not in it. Give several runs on different memory
    where one would come from the cache.
    """
    if device.type != "cuda":
        return statistics.median(_timed(runs) for _ in range(max(3, repeats // 3)))
    return statistics.median(_graph_rounds(runs, repeats))


def _timed(runs: list[Callable[[], object]]) -> float:
    begin = time.perf_counter()
    for run in runs:
        run()
    return (time.perf_counter() - begin) * 1e3 / len(runs)


def _graph_rounds(runs: list[Callable[[], object]], repeats: int) -> Iterator[float]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        runs[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for run in runs:
            run()
    graph.replay()
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
    for begin, end in zip(begins, ends, strict=True):
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    yield from (begin.elapsed_time(end) / len(runs) for begin, end in zip(begins, ends, strict=True))


@dataclass(frozen=True)
class Limits:
    """What this machine can do, measured."""

    copy_gb_per_s: float
    """Bytes read and written by a large copy from device memory to device memory."""
    product_tflop_per_s: float
    """Of a large matrix product."""

    @classmethod
    def measure(cls, report: Report, dtype: torch.dtype) -> Limits:
        device, num_bytes, size = report.device, 4 << 30, 8192
        if report.tiny or not report.on_gpu:
            num_bytes, size = 64 << 20, 512
        source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy_ms = time_ms([lambda: target.copy_(source)], device)
        matrix = torch.randn(size, size, device=device).to(dtype)
        product_ms = time_ms([lambda: matrix @ matrix], device)
        limits = cls(2 * num_bytes / copy_ms / 1e6, 2 * size**3 / product_ms / 1e9)
        report.show("copy GB/s", round(limits.copy_gb_per_s, 1), f"{limits.copy_gb_per_s:.0f} GB/s read and written")
        text = f"{limits.product_tflop_per_s:.2f} TFLOP/s, {dtype}, {size} x {size}"
        report.show("matrix product TFLOP/s", round(limits.product_tflop_per_s, 3), text)
        return limits


def free_bytes(device: torch.device) -> int:
    """Of the device's memory; of a CPU's so much as these scripts may take."""
    if device.type != "cuda":
        return 256 << 20
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
