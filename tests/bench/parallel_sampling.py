"""One request for several outputs against as many requests: prefill, KV blocks, time.

    python tests/bench/parallel_sampling.py [--n 8] [--prompt-tokens 1000] [--output-tokens 64] [--repeats 3]
                                            [--model FOLDER] [--dtype float32] [--threads N]

Both sample at temperature 1 and ignore the end of sequence. The n requests have the same prompt, and no prefix cache:
what they cost where nothing is shared. The two are run in turn, each on a new engine with an empty pool. The ratio of
each pair is printed, and that of CPU time, which depends less on what else the machine does; see the load average.

    shared + own    full blocks of the prompt, and for each output what it needs beyond them
    peak            the most blocks that were held when a step had been planned

The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from in_process import Bench, add_model_arguments, find_model, make_spec, run_to_end, show

from octavo.worker.engine import Engine
from octavo.worker.messages import Branch, Request, SamplingParams, SequenceUpdate
from octavo.worker.step_plan import StepPlan

MOST_PEAK_RATIO, LEAST_SPEED_UP = 1.15, 3.0


@dataclass
class Run:
    seconds: float = 0.0
    cpu_s: float = 0.0
    """Of all threads."""
    first_token_s: float = 0.0
    """When every output has its first token."""
    num_prefill_tokens: int = 0
    peak_blocks: int = 0
    num_output_tokens: int = 0


def main() -> None:
    args = parse_args()
    model_dir = find_model(args)
    total = args.prompt_tokens + args.output_tokens
    spec = make_spec(
        model_dir,
        args.dtype,
        max_num_seqs=args.n,
        max_num_batched_tokens=2_048,
        max_model_len=total,
        num_blocks=args.n * (total // 16 + 2),
    )
    bench = Bench.load(spec, model_dir)
    generator = torch.Generator().manual_seed(0)
    vocab_size = bench.loaded.runner.config.vocab_size
    prompt = tuple(torch.randint(100, vocab_size, (args.prompt_tokens,), generator=generator).tolist())
    together = [request(prompt, args.output_tokens, index=0, num_branches=args.n)]
    apart = [request(prompt, args.output_tokens, index=index, num_branches=1) for index in range(args.n)]
    run(
        bench, [request(prompt[:100], 8, index=0, num_branches=args.n)], use_cache=True
    )  # threads and buffers are there
    pairs = [(run(bench, together, use_cache=True), run(bench, apart, use_cache=False)) for _ in range(args.repeats)]
    figures = report(args, pairs, spec.block_size)
    show(bench.conditions() | {name: getattr(args, name) for name in ("prompt_tokens", "output_tokens", "n")}, figures)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=8, help="outputs")
    parser.add_argument("--prompt-tokens", type=int, default=1_000)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    add_model_arguments(parser)
    return parser.parse_args()


def request(prompt: tuple[int, ...], output_tokens: int, *, index: int, num_branches: int) -> Request:
    branches = tuple(Branch(number) for number in range(num_branches))
    return Request(str(index), "bench", "bench", prompt, b"", SamplingParams(output_tokens, seed=index), branches)


def run(bench: Bench, requests: list[Request], *, use_cache: bool) -> Run:
    result = Run()

    def emit(gateway: str, update: SequenceUpdate) -> None:
        if update.position == 0:
            result.first_token_s = time.perf_counter() - started
        result.num_output_tokens += len(update.token_ids)

    def observe(engine: Engine, plan: StepPlan) -> None:
        result.peak_blocks = max(result.peak_blocks, engine.scheduler.pool.num_held_blocks)
        starts = zip(plan.num_computed_tokens.tolist(), plan.num_new_tokens.tolist(), strict=True)
        length = len(requests[0].prompt_token_ids)
        result.num_prefill_tokens += sum(max(0, min(start + count, length) - start) for start, count in starts)

    engine = bench.engine(emit, observe, enable_prefix_caching=use_cache)
    started, cpu_started = time.perf_counter(), time.process_time()
    for each in requests:
        engine.submit(each)
    run_to_end(engine)
    result.seconds, result.cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    if engine.scheduler.pool.num_held_blocks:
        raise SystemExit("blocks are held after the end")
    return result


def report(args: argparse.Namespace, pairs: list[tuple[Run, Run]], block_size: int) -> dict[str, object]:
    one, several = pairs[0]
    shared = args.prompt_tokens // block_size
    # The last token of an output is not computed.
    own = -(-(args.prompt_tokens + args.output_tokens - 1) // block_size) - shared
    needed = shared + args.n * own
    ratios = [apart.seconds / together.seconds for together, apart in pairs]
    cpu_ratios = [apart.cpu_s / together.cpu_s for together, apart in pairs]
    speed_up, cpu_ratio = statistics.median(ratios), statistics.median(cpu_ratios)
    rates = [statistics.median(runs[side].num_output_tokens / runs[side].seconds for runs in pairs) for side in (0, 1)]
    print(
        f"prefill: {one.num_prefill_tokens} tokens for n = {args.n}, {several.num_prefill_tokens} for {args.n} requests"
    )
    print(
        f"peak: {one.peak_blocks} blocks, {one.peak_blocks / needed:.3f} × shared {shared} + own {args.n} × {own} "
        f"(wanted at most {MOST_PEAK_RATIO}); {several.peak_blocks} for {args.n} requests"
    )
    for name, runs in (("n = ", [pair[0] for pair in pairs]), ("requests: ", [pair[1] for pair in pairs])):
        prefill_s = statistics.median(run.first_token_s for run in runs)
        decode_s = statistics.median(run.seconds - run.first_token_s for run in runs)
        print(f"{name}{args.n}: first tokens after {prefill_s:.2f} s, the others in {decode_s:.2f} s")
    print(
        f"output: {rates[0]:.1f} against {rates[1]:.1f} tokens/s, ratio {speed_up:.2f} "
        f"(median of {len(pairs)}, wanted at least {LEAST_SPEED_UP}); of CPU time {cpu_ratio:.2f}"
    )
    print("each pair: " + ", ".join(f"{a:.2f} (CPU {b:.2f})" for a, b in zip(ratios, cpu_ratios, strict=True)))
    return {
        "prefill_tokens": one.num_prefill_tokens,
        "prefill_tokens_apart": several.num_prefill_tokens,
        "peak_blocks": one.peak_blocks,
        "peak_blocks_apart": several.peak_blocks,
        "peak_ratio": one.peak_blocks / needed,
        "tokens_per_s": rates[0],
        "tokens_per_s_apart": rates[1],
        "speed_up": speed_up,
        "speed_ups": ratios,
        "cpu_ratio": cpu_ratio,
        "cpu_ratios": cpu_ratios,
        "repeats": len(pairs),
    }


if __name__ == "__main__":
    main()
