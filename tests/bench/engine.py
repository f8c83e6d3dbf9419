"""Engine against transformers: tokens per second at 1 and 16 sequences, interleaved in one run.

    python tests/bench/engine.py [--model FOLDER] [--prompt-tokens 128] [--output-tokens 64] [--repeats 3] [--threads N]

Both compute in float32 on the same number of threads, greedily, the same number of output tokens (end of sequence
ignored). transformers gets its 16 sequences as one batch of equal length, without padding: its best case. Prefill is
part of both times. The engine's prefix cache is off, since every repeat has the same prompts. Prints ratios; the last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import platformdirs
import torch

from octavo.worker.checkpoint import resolve_model
from octavo.worker.engine import Engine
from octavo.worker.messages import Request, SamplingParams
from octavo.worker.rank import LoadedRank, executor_of, load_alone, scheduler_of
from octavo.worker.spec import WorkerSpec

RATIOS_WANTED = {1: 1.5, 16: 3.0}


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    model_dir = args.model or resolve_model(None, cache_dir=platformdirs.user_cache_path("octavo"), report=print).path
    spec = make_spec(model_dir, args)
    loaded = load_alone(model_dir, spec)
    theirs = load_transformers(model_dir)
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
        "dtype": "float32",
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
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def make_spec(model_dir: Path, args: argparse.Namespace) -> WorkerSpec:
    return WorkerSpec(
        model=str(model_dir),
        served_model_name="bench",
        group="bench",
        generation=1,
        tensor_parallel_size=1,
        device="cpu",
        dtype="float32",
        block_size=16,
        max_num_seqs=max(RATIOS_WANTED),
        max_num_batched_tokens=2048,
        max_model_len=args.prompt_tokens + args.output_tokens,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=None,
        gpu_memory_utilization=0.9,
        num_gpu_blocks_override=None,
        num_ranks_on_machine=1,
        routing_key=b"benchmark's key!",
        cache_dir=platformdirs.user_cache_path("octavo"),
        router_name="none",
        ray_namespace="none",
        startup_timeout_s=600.0,
    )


def make_prompts(count: int, length: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(100, vocab_size, (count, length), generator=generator)


def run_engine(spec: WorkerSpec, loaded: LoadedRank, prompts: torch.Tensor, output_tokens: int) -> float:
    """Output tokens per second."""
    engine = Engine(
        scheduler_of(spec, loaded), executor_of(loaded), clock=time.perf_counter, emit=lambda gateway, update: None
    )
    started = time.perf_counter()
    for index, prompt in enumerate(prompts.tolist()):
        sampling = SamplingParams(output_tokens, seed=0, temperature=0.0)
        engine.submit(Request(str(index), "bench", "bench", tuple(prompt), (), sampling))
    while engine.step():
        pass
    return len(prompts) * output_tokens / (time.perf_counter() - started)


def load_transformers(model_dir: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@torch.inference_mode()
def run_transformers(model: torch.nn.Module, prompts: torch.Tensor, output_tokens: int) -> float:
    """Output tokens per second."""
    started = time.perf_counter()
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=output_tokens,
        min_new_tokens=output_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return len(prompts) * output_tokens / (time.perf_counter() - started)


def report(count: int, args: argparse.Namespace, pairs: list[tuple[float, float]]) -> dict[str, float]:
    ours = statistics.median(pair[0] for pair in pairs)
    theirs = statistics.median(pair[1] for pair in pairs)
    ratio = statistics.median(a / b for a, b in pairs)
    print(
        f"{count} sequences of {args.prompt_tokens} + {args.output_tokens} tokens: engine {ours:.1f} tokens/s, "
        f"transformers {theirs:.1f} tokens/s, ratio {ratio:.2f} (expected at least {RATIOS_WANTED[count]})"
    )
    return {"engine_tokens_per_s": ours, "transformers_tokens_per_s": theirs, "ratio": ratio}


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
