"""What the sampling of a step costs, by what its rows ask for, beside rows that ask for nothing.

    python tests/bench/sampling.py [--device cpu|cuda] [--rows 1 16 64] [--vocabulary 49152] [--threads N]
                                   [--seconds N]

A step is what the executor does from the logits to the tokens on the host: the states hear of the last tokens, arrays
are made of rows and states, kernels run, tokens and log-probabilities are copied. All rows of a step ask for the same.
The kinds take turns, so that what else the machine does hits all of them. A time is the least of all steps: on a busy
machine threads wait for each other, and a median is that wait. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.backend import Kernels, select_kernels
from octavo.worker.messages import SamplingParams
from octavo.worker.sampler import sample_rows
from octavo.worker.sampling_row import SamplingRow
from octavo.worker.sampling_state import SamplingState, needs_state
from octavo.worker.token_logprobs import LogprobsCopy

NUM_SEEN, NUM_BIASED, NUM_LOGPROBS = 1000, 100, 5
PLAIN = "greedy"


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    kernels = select_kernels(torch.device(args.device))
    conditions = describe(args, kernels)
    print(conditions)
    figures = []
    for num_rows in args.rows:
        logits = 3 * torch.randn(num_rows, args.vocabulary, device=args.device)
        times_ms = measure(logits, kernels, args.seconds / len(args.rows))
        for kind, ms in times_ms.items():
            ratio = ms / times_ms[PLAIN]
            print(f"{num_rows:4} rows, {kind:40} {ms:9.3f} ms {ratio:6.2f} × {PLAIN}", flush=True)
            figures.append({"rows": num_rows, "kind": kind, "ms": ms, "ratio": ratio})
    print(json.dumps({"conditions": conditions, "steps": figures}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=15.0, help="for all of it")
    return parser.parse_args()


def describe(args: argparse.Namespace, kernels: Kernels) -> str:
    cpu = f"{args.threads} threads, {torch.backends.cpu.get_cpu_capability()}"
    where = torch.cuda.get_device_name() if args.device == "cuda" else cpu
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    return f"{kernels.name} kernels, vocabulary {args.vocabulary}, {where}, torch {torch.__version__}, {load}"


def kinds(vocab_size: int) -> dict[str, tuple[SamplingParams, int]]:
    """Of each its parameters, and how many different tokens its prompt has."""
    tokens = torch.randperm(vocab_size)[: vocab_size // 2].tolist()
    penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.2}
    bias = {"logit_bias": tuple((token, -1.5) for token in tokens[:NUM_BIASED])}
    wishes: dict[str, tuple[dict[str, object], int]] = {
        PLAIN: ({}, 0),
        "temperature": ({"temperature": 0.7}, 0),
        "temperature, top_p 0.9": ({"temperature": 0.7, "top_p": 0.9}, 0),
        f"penalties, {NUM_SEEN} tokens seen": (penalties, NUM_SEEN),
        f"bias for {NUM_BIASED} tokens": (bias, 0),
        "half of the tokens allowed": ({"allowed_token_ids": tuple(tokens)}, 0),
        f"{NUM_LOGPROBS} log-probabilities": ({"num_logprobs": NUM_LOGPROBS}, 0),
        "all of these": (
            {"temperature": 0.7, "top_p": 0.9, "num_logprobs": NUM_LOGPROBS, "allowed_token_ids": tuple(tokens)}
            | penalties
            | bias,
            NUM_SEEN,
        ),
    }
    common: dict[str, object] = {"max_tokens": 1 << 30, "seed": 0, "temperature": 0.0}
    return {kind: (SamplingParams(**common | wish), seen) for kind, (wish, seen) in wishes.items()}  # type: ignore[arg-type]


@dataclass(slots=True)
class Steps:
    """Rows that ask for the same, step after step."""

    sampling: SamplingParams
    states: list[SamplingState | None]
    position: int = 0

    @classmethod
    def begin(cls, sampling: SamplingParams, num_seen: int, num_rows: int, vocab_size: int) -> Steps:
        def state() -> SamplingState | None:
            prompt = torch.randperm(vocab_size)[:num_seen].tolist()
            return SamplingState.start(sampling, tuple(prompt)) if needs_state(sampling) else None

        return cls(sampling, [state() for _ in range(num_rows)])

    def seconds(self, logits: Tensor, kernels: Kernels) -> float:
        """Of one step."""
        rows = [self._row(index, state) for index, state in enumerate(self.states)]
        begin = time.perf_counter()
        sampled = sample_rows(logits, rows, kernels)
        for part in sampled.logprobs:
            LogprobsCopy(part).wait()
        for state, token_id in zip(self.states, sampled.token_ids.tolist(), strict=True):
            if state is not None:
                state.accept(self.position, token_id)
        self.position += 1
        return time.perf_counter() - begin

    def _row(self, index: int, state: SamplingState | None) -> SamplingRow:
        s = self.sampling
        return SamplingRow(
            index,
            0,
            self.position,
            s.temperature,
            s.top_p,
            s.top_k,
            min_p=s.min_p,
            num_logprobs=s.num_logprobs,
            state=state,
        )


def measure(logits: Tensor, kernels: Kernels, seconds: float) -> dict[str, float]:
    """The least of each kind's steps, in ms; the first ones, which may compile, are left out."""
    num_rows, vocab_size = logits.shape
    steps = {kind: Steps.begin(*wish, num_rows, vocab_size) for kind, wish in kinds(vocab_size).items()}
    for _ in range(2):
        for each in steps.values():
            each.seconds(logits, kernels)
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[PLAIN]) < 5:
        for kind, each in steps.items():
            times[kind].append(each.seconds(logits, kernels))
    return {kind: 1e3 * min(found) for kind, found in times.items()}


if __name__ == "__main__":
    main()
