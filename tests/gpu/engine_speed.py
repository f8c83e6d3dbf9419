"""The engine's decode with random weights: tokens/s, with and without CUDA graphs, and the share of what memory allows.

    PYTHONPATH=.ci/types:tests/support python tests/gpu/engine_speed.py [--device cpu --tiny] [--seconds N]

Shapes of Qwen3-0.6B, without the norms of its queries and keys, and of Llama-3.1-8B, bfloat16. All sequences have the
same length and are submitted at once, without a prefix cache, greedy; steps are planned ahead. The rate is that of
decoding alone: tokens that came after every sequence had its first one, over that time. The limit is the measured copy
bandwidth over the bytes that a step must read: all matrices, and K and V of the tokens so far.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from measuring import Limits as Roofline
from measuring import Report, free_bytes
from random_engine import LLAMA_3_1_8B, QWEN3_0_6B, SMALL, TINY, RandomRank, Shape, recorder_for

from octavo.kernels.backend import select_kernels
from octavo.worker.messages import Request, SamplingParams, SequenceUpdate
from octavo.worker.model_runner import Limits

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Load:
    batch: int
    prompt: int
    output: int

    @property
    def length(self) -> int:
        return self.prompt + self.output


@dataclass
class Stream:
    """When which tokens came."""

    prompts_waiting: int
    times_s: list[float] = field(default_factory=list)
    """Of the tokens after every sequence's first."""
    begin_s: float = 0.0
    seen: set[str] = field(default_factory=set)

    def emit(self, gateway: str, update: SequenceUpdate) -> None:
        now = time.perf_counter()
        if len(self.seen) == self.prompts_waiting:
            self.times_s += [now] * len(update.token_ids)
        elif update.token_ids:
            self.seen.add(update.request_id)
            self.begin_s = now

    @property
    def tokens_per_s(self) -> float:
        return len(self.times_s) / (self.times_s[-1] - self.begin_s)


def main() -> None:
    report = Report.from_arguments(__doc__)
    roofline = Roofline.measure(report, torch.bfloat16 if report.on_gpu else torch.float32)
    models = {"Qwen3-0.6B": QWEN3_0_6B, "Llama-3.1-8B": LLAMA_3_1_8B}
    loads = [Load(1, 512, 256), Load(32, 512, 256), Load(256, 256, 128)]
    if report.tiny or not report.on_gpu:
        models, loads = {"tiny": TINY, "small": SMALL}, [Load(1, 20, 6), Load(4, 20, 6)]
    for name, shape in models.items():
        if report.has_time(name, 30.0 if report.on_gpu else 0.0):
            with report.part(name):
                measure_model(report, roofline, name, shape, loads)
    report.finish()


def measure_model(report: Report, roofline: Roofline, name: str, shape: Shape, loads: list[Load]) -> None:
    device = report.device
    dtype = torch.bfloat16 if report.on_gpu else torch.float32
    most, longest = max(load.batch for load in loads), max(load.length for load in loads)
    limits = Limits(BLOCK_SIZE, most, 8192, -(-longest // BLOCK_SIZE) * BLOCK_SIZE)
    num_blocks = max(load.batch * (-(-load.length // BLOCK_SIZE) + 1) for load in loads) + 64
    rank = RandomRank.make(shape, device, dtype, select_kernels(device), limits, num_blocks)
    for load in loads:
        for with_graphs in (False, True):
            case = f"{name}, batch {load.batch}, {'graphs' if with_graphs else 'eager'}"
            if report.has_time(case, 10.0 if report.on_gpu else 0.0):
                with report.part(case):
                    prepare(report, rank, load, with_graphs=with_graphs)
                    measure(report, roofline, rank, load, case)


def prepare(report: Report, rank: RandomRank, load: Load, *, with_graphs: bool) -> None:
    rank.use_graphs(recorder_for(report.device) if with_graphs else None)
    if not with_graphs:
        return
    before = free_bytes(report.device)
    first_s = rank.record(load.batch, load.length)
    took = before - free_bytes(report.device)
    text = f"{took / 2**20:.0f} MiB and {first_s:.2f} s for the first graph of {load.batch} rows, its pool with it"
    report.show(f"graph of {rank.shape.num_hidden_layers} layers, {load.batch} rows", [took, round(first_s, 3)], text)
    if report.on_gpu:
        before = free_bytes(report.device)
        again_s = rank.record(max(1, load.batch // 2), load.length)
        took = before - free_bytes(report.device)
        text = f"{took / 2**20:.0f} MiB and {again_s:.2f} s for a smaller one beside it"
        report.show(f"second graph, {load.batch} rows", [took, round(again_s, 3)], text)


def measure(report: Report, roofline: Roofline, rank: RandomRank, load: Load, case: str) -> None:
    executor = rank.executor()
    try:
        # Compiles: attention divides the keys differently at the end, unless a graph has fixed it.
        run(rank, executor, Load(load.batch, load.prompt, 4))
        if rank.runner.graphs is None:
            run(rank, executor, Load(load.batch, load.length - 4, 4))
        stream = run(rank, executor, load)
    finally:
        executor.shut_down()
    element_bytes = rank.runner.placement.dtype.itemsize
    kv = load.batch * (load.prompt + load.output / 2) * rank.shape.num_kv_per_token
    num_bytes = (rank.shape.num_step_weights + kv) * element_bytes
    limit = load.batch * roofline.copy_gb_per_s * 1e9 / num_bytes
    share = stream.tokens_per_s / limit
    step_ms = load.batch / stream.tokens_per_s * 1e3
    figures = {"tokens_per_s": round(stream.tokens_per_s, 1), "step_ms": round(step_ms, 3), "of_limit": round(share, 3)}
    text = f"{stream.tokens_per_s:10.0f} tokens/s, {step_ms:8.2f} ms a step, {share:6.1%} of the limit"
    report.show(f"{case}, {load.prompt} + {load.output}", figures, text)


def run(rank: RandomRank, executor: object, load: Load) -> Stream:
    stream = Stream(load.batch)
    engine = rank.engine(executor, stream.emit)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(load.batch)
    prompts = torch.randint(0, rank.shape.vocab_size, (load.batch, load.prompt), generator=generator)
    sampling = SamplingParams(load.output, seed=0, temperature=0.0)
    for number, prompt in enumerate(prompts.tolist()):
        engine.submit(Request(str(number), "bench", "bench", tuple(prompt), b"", sampling))
    while engine.step():
        pass
    return stream


if __name__ == "__main__":
    main()
