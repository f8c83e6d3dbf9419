"""Engine against transformers: tokens per second at 1 and 16 sequences, interleaved in one run.

    python tests/bench/engine.py [--model FOLDER] [--prompt-tokens 128] [--output-tokens 64] [--repeats 3] [--threads N]
                                 [--dtype float32|bfloat16]

Both compute in the same dtype on the same number of threads, greedily, the same number of output tokens (the end of
sequence is ignored). transformers gets its 16 sequences as one batch of equal length, without padding: its best case.
The engine's prefix cache is off, since every repeat has the same prompts. Prints the ratio of output tokens per second
from the submission on (prefill included), and of decoding alone, from the moment that every sequence has its first
token. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from in_process import add_model_arguments, find_model, make_spec
from transformers import AutoModelForCausalLM, StoppingCriteria

from octavo.worker.group_engine import engine_of
from octavo.worker.messages import Request, SamplingParams, SequenceUpdate
from octavo.worker.rank import LoadedRank, executor_of, load_alone
from octavo.worker.spec import WorkerSpec

RATIOS_WANTED = {1: 1.5, 16: 3.0}


def main() -> None:
    args = parse_args()
    model_dir = find_model(args)
    spec = make_bench_spec(model_dir, args)
    loaded = load_alone(model_dir, spec)
    theirs = load_transformers(model_dir, args.dtype)
    figures = {}
    for count in RATIOS_WANTED:
        prompts = make_prompts(count, args.prompt_tokens, loaded.runner.config.vocab_size)
        run_engine(spec, loaded, prompts, args.output_tokens)
        run_transformers(theirs, prompts, args.output_tokens)
        pairs = [
            (
                run_engine(spec, loaded, prompts, args.output_tokens),
                run_transformers(theirs, prompts, args.output_tokens),
            )
            for _ in range(args.repeats)
        ]
        figures[count] = report(count, args, pairs)
    conditions = {
        "model": model_dir.name,
        "dtype": args.dtype,
        "threads": args.threads,
        "machine": processor(),
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "repeats": args.repeats,
        "torch": torch.__version__,
        "kernels": loaded.kernels.name,
    }
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    print(json.dumps({"conditions": conditions, "sequences": figures}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def make_bench_spec(model_dir: Path, args: argparse.Namespace) -> WorkerSpec:
    spec = make_spec(
        model_dir,
        args.dtype,
        max_num_seqs=max(RATIOS_WANTED),
        max_num_batched_tokens=2048,
        max_model_len=args.prompt_tokens + args.output_tokens,
        num_blocks=None,
    )
    return replace(spec, enable_prefix_caching=False)


def make_prompts(count: int, length: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(100, vocab_size, (count, length), generator=generator)


@dataclass(frozen=True)
class Run:
    """Output tokens per second, over all and after the first token of every sequence."""

    whole: float
    decode: float

    @classmethod
    def of(cls, count: int, output_tokens: int, started: float, first: float, ended: float) -> Run:
        return cls(count * output_tokens / (ended - started), count * (output_tokens - 1) / (ended - first))


def run_engine(spec: WorkerSpec, loaded: LoadedRank, prompts: torch.Tensor, output_tokens: int) -> Run:
    first_token_s: dict[str, float] = {}

    def emit(gateway: str, update: SequenceUpdate) -> None:
        first_token_s.setdefault(update.request_id, time.perf_counter())

    engine = engine_of(spec, loaded, executor_of(loaded), emit, time.perf_counter)
    started = time.perf_counter()
    for index, prompt in enumerate(prompts.tolist()):
        sampling = SamplingParams(output_tokens, seed=0, temperature=0.0)
        engine.submit(Request(str(index), "bench", "bench", tuple(prompt), b"", sampling))
    while engine.step():
        pass
    return Run.of(len(prompts), output_tokens, started, max(first_token_s.values()), time.perf_counter())


def load_transformers(model_dir: Path, dtype: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()


class StepTimes(StoppingCriteria):
    """Never stops; notes when each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


@torch.inference_mode()
def run_transformers(model: torch.nn.Module, prompts: torch.Tensor, output_tokens: int) -> Run:
    steps = StepTimes()
    started = time.perf_counter()
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=output_tokens,
        min_new_tokens=output_tokens,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=[steps],
    )
    return Run.of(len(prompts), output_tokens, started, steps.times[0], time.perf_counter())


def report(count: int, args: argparse.Namespace, pairs: list[tuple[Run, Run]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for part in ("whole", "decode"):
        rates = [(getattr(ours, part), getattr(theirs, part)) for ours, theirs in pairs]
        ours, theirs = (statistics.median(rate[side] for rate in rates) for side in (0, 1))
        ratio = statistics.median(rate[0] / rate[1] for rate in rates)
        figures |= {f"{part}_engine": ours, f"{part}_transformers": theirs, f"{part}_ratio": ratio}
        print(
            f"{count} sequences of {args.prompt_tokens} + {args.output_tokens} tokens, {part}: engine {ours:.1f}, "
            f"transformers {theirs:.1f} tokens/s, ratio {ratio:.2f} (expected at least {RATIOS_WANTED[count]})"
        )
    return figures


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
