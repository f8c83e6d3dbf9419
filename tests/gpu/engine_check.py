"""The paged engine on the device: greedy outputs are the same whatever it does to be fast.

    PYTHONPATH=.ci/types:tests/support python tests/gpu/engine_check.py [--device cpu --tiny] [--seconds N]

A small model with random weights in float32. The plain way is: no prefix cache, no graphs, one step at a time, the
reference kernels. Against it: the fast kernels; with graphs; planned ahead; with the cache, cold and warm; two branches
of each prompt, drawn with a seed, whose last block is copied when they part; everything at once, with sequences that
come and end while others run. Where two logits are nearly equal an output may differ: one in 16 is allowed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from measuring import Report
from random_engine import SMALL, TINY, RandomRank, Recorder, recorder_for

from octavo.kernels.backend import Kernels, reference_kernels, select_kernels
from octavo.worker.executor import Executor
from octavo.worker.messages import Branch, Request, SamplingParams, SequenceUpdate
from octavo.worker.model_runner import Limits

BLOCK_SIZE = 16
Outputs = dict[tuple[str, int], list[int]]


@dataclass(frozen=True)
class Work:
    prompts: list[list[int]]
    lengths: list[int]
    """Output tokens of each."""
    num_branches: int = 1
    temperature: float = 0.0

    def requests(self) -> list[Request]:
        branches = tuple(Branch(index) for index in range(self.num_branches))
        return [
            Request(
                str(number),
                "check",
                "check",
                tuple(prompt),
                b"",
                SamplingParams(length, seed=number, temperature=self.temperature),
                branches,
            )
            for number, (prompt, length) in enumerate(zip(self.prompts, self.lengths, strict=True))
        ]


@dataclass(frozen=True)
class Way:
    graphs: bool = False
    plans_ahead: bool = False
    caches: bool = False
    rounds: int = 1
    """The last one counts: the others fill the cache."""


WAYS = {
    "fast kernels": Way(),
    "graphs": Way(graphs=True),
    "planned ahead": Way(plans_ahead=True),
    "cache, cold": Way(caches=True),
    "cache, warm": Way(caches=True, rounds=2),
    "everything": Way(graphs=True, plans_ahead=True, caches=True, rounds=2),
}


def main() -> None:
    report = Report.from_arguments(__doc__)
    torch.backends.cuda.matmul.allow_tf32 = False
    works = make_works(report)
    plain, fast = (make_rank(report, kernels) for kernels in (reference_kernels(), select_kernels(report.device)))
    expected: dict[str, Outputs] = {}
    for name, work in works.items():
        with report.part(f"plain, {name}"):
            expected[name] = outputs_of(plain, work, Way(), None)
    for way_name, way in WAYS.items():
        for name, work in works.items():
            case = f"{way_name}, {name}"
            if name in expected and report.has_time(case):
                with report.part(case):
                    recorder = recorder_for(report.device) if way.graphs else None
                    compare(report, case, expected[name], outputs_of(fast, work, way, recorder))
    report.finish()


def make_works(report: Report) -> dict[str, Work]:
    vocab_size, count, longest = (2048, 32, 300) if report.on_gpu and not report.tiny else (256, 6, 40)
    generator = torch.Generator().manual_seed(1)

    def numbers(low: int, high: int, size: int) -> list[int]:
        drawn: list[int] = torch.randint(low, high, (size,), generator=generator).tolist()
        return drawn

    common = numbers(0, vocab_size, longest // 2)
    lengths = numbers(1, longest // 2, count)
    prompts = [common[: 7 * number % len(common)] + numbers(0, vocab_size, n) for number, n in enumerate(lengths)]
    outputs = numbers(4, 64 if report.on_gpu and not report.tiny else 12, count)
    return {
        "greedy": Work(prompts, outputs),
        "two branches, drawn": Work(prompts[: count // 2], outputs[: count // 2], num_branches=2, temperature=0.8),
    }


def make_rank(report: Report, kernels: Kernels) -> RandomRank:
    limits = Limits(BLOCK_SIZE, max_num_seqs=24, max_num_batched_tokens=512, max_model_len=512)
    shape = SMALL if report.on_gpu and not report.tiny else TINY
    return RandomRank.make(shape, report.device, torch.float32, kernels, limits, num_blocks=24 * 32)


def outputs_of(rank: RandomRank, work: Work, way: Way, recorder: Recorder | None) -> Outputs:
    outputs: Outputs = defaultdict(list)

    def emit(gateway: str, update: SequenceUpdate) -> None:
        if update.error:
            raise RuntimeError(update.error)
        outputs[update.request_id, update.branch] += update.token_ids

    rank.use_graphs(recorder)
    if recorder is not None:
        for num_rows in (24, 8, 1):  # the others take a larger one
            rank.record(num_rows, 1)
    executor = rank.executor()
    try:
        engine = rank.engine(executor, emit, plans_ahead=way.plans_ahead, caches=way.caches)
        for _ in range(way.rounds):
            outputs.clear()
            run(engine, executor, work)
        engine.check()
    finally:
        executor.shut_down()
    return dict(outputs)


def run(engine: object, executor: Executor, work: Work) -> None:
    """Half of the requests come at once, the others one with every step; beats come in between."""
    requests = work.requests()
    later = requests[len(requests) // 2 :]
    for request in requests[: len(requests) // 2]:
        engine.submit(request)  # type: ignore[attr-defined]
    while engine.step() or later:  # type: ignore[attr-defined]
        if later:
            engine.submit(later.pop())  # type: ignore[attr-defined]
    executor.heartbeat()


def compare(report: Report, case: str, expected: Outputs, actual: Outputs) -> None:
    same = sum(expected[key] == actual.get(key) for key in expected)
    report.show(case, [same, len(expected)], f"{same} of {len(expected)} outputs are the same")
    if same < len(expected) - len(expected) // 16:
        raise RuntimeError(f"only {same} of {len(expected)} outputs are the same")


if __name__ == "__main__":
    main()
