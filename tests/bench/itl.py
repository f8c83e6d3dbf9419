"""A long prompt beside running streams: how long they wait for their tokens, and how long it takes to its first.

    python tests/bench/itl.py [--target-itl-ms none 150 300] [--prompt-tokens 6000] [--streams 8] [--budget 2048]
                              [--model FOLDER] [--dtype float32] [--threads N]

``--streams`` requests with short prompts are being generated; once each has 32 tokens, the long prompt arrives. A gap
is the time between two tokens of one stream; counted are those that end after that arrival and begin before the long
prompt's first token. Each target gets a new engine that has seen nothing but these streams.

    target   ``--target-itl-ms``; none: a step has the whole budget
    ttft     from the long prompt's arrival to its first token
    cores    CPU time of this process / time, while the prompt is computed: well below ``--threads``, and something else
             had the machine, so that the times say little about the engine
    floor    share of those steps that had no more prefill than the budget always grants (a block): there the target
             asks for more than the machine gives, and only the step's own cost decides

The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass, field

import torch
from in_process import Bench, add_model_arguments, find_model, make_spec, show

from octavo.worker.engine import Engine
from octavo.worker.messages import Request, SamplingParams, SequenceUpdate
from octavo.worker.step_plan import StepPlan

WARM_UP_TOKENS, STREAM_PROMPT_TOKENS = 32, 64
LONG = "long"
MOST_OF_TARGET = 2.0


@dataclass
class Times:
    """When tokens came, by request, in seconds."""

    tokens: dict[str, list[float]] = field(default_factory=dict)

    def emit(self, gateway: str, update: SequenceUpdate) -> None:
        if update.token_ids:
            self.tokens.setdefault(update.request_id, []).append(time.perf_counter())

    def gaps(self, begin: float, end: float) -> list[float]:
        """Of the streams: those that end after ``begin`` and begin before ``end``."""
        streams = [times for name, times in self.tokens.items() if name != LONG]
        pairs = [pair for times in streams for pair in itertools.pairwise(times)]
        return [later - earlier for earlier, later in pairs if later > begin and earlier < end]


def main() -> None:
    args = parse_args()
    model_dir = find_model(args)
    spec = make_spec(
        model_dir,
        args.dtype,
        max_num_seqs=args.streams + 1,
        max_num_batched_tokens=args.budget,
        max_model_len=8_192,
        num_blocks=2_048,
    )
    bench = Bench.load(spec, model_dir)
    figures: dict[str, object] = {}
    for target_ms in args.target_itl_ms:
        figures[str(target_ms)] = run(bench, args, target_ms)
    show(bench.conditions() | {name: getattr(args, name) for name in ("prompt_tokens", "streams")}, figures)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-itl-ms", nargs="+", type=target, default=[None, 150.0, 300.0])
    parser.add_argument("--prompt-tokens", type=int, default=6_000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--budget", type=int, default=2_048, help="tokens of a step")
    add_model_arguments(parser)
    return parser.parse_args()


def target(text: str) -> float | None:
    return None if text == "none" else float(text)


def run(bench: Bench, args: argparse.Namespace, target_ms: float | None) -> dict[str, float]:
    times = Times()
    prefills: list[int] = []

    def observe(engine: Engine, plan: StepPlan) -> None:
        """Notes the prompt tokens of each step that has some: what is beyond one token of each sequence."""
        if plan.token_ids.size > plan.slots.size:
            prefills.append(int(plan.num_new_tokens.max()))

    engine = bench.engine(times.emit, observe, target_itl_s=None if target_ms is None else target_ms / 1_000)
    vocab_size = bench.loaded.runner.config.vocab_size
    for index in range(args.streams):
        engine.submit(request(str(index), STREAM_PROMPT_TOKENS, vocab_size, max_tokens=8_192 - STREAM_PROMPT_TOKENS))
    step_until_each_has(engine, times, args.streams, WARM_UP_TOKENS)
    alone = times.gaps(max(each[WARM_UP_TOKENS // 2] for each in times.tokens.values()), time.perf_counter())
    prefills.clear()
    arrival, cpu_started = time.perf_counter(), time.process_time()
    engine.submit(request(LONG, args.prompt_tokens, vocab_size, max_tokens=16))
    while LONG not in times.tokens:
        engine.step()
    first = times.tokens[LONG][0]
    cores = (time.process_time() - cpu_started) / (first - arrival)
    floor = statistics.mean(count <= bench.spec.block_size for count in prefills)
    num_steps = len(prefills)
    engine.step()
    for name in [*times.tokens]:
        engine.abort(name)
    while engine.step():
        pass
    figures = {"ttft_s": first - arrival, "cores": cores, "steps": num_steps, "floor_share": floor}
    return report(target_ms, alone, times.gaps(arrival, first), figures)


def request(name: str, num_tokens: int, vocab_size: int, *, max_tokens: int) -> Request:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    prompt = tuple(torch.randint(100, vocab_size, (num_tokens,), generator=generator).tolist())
    return Request(name, "bench", "bench", prompt, b"", SamplingParams(max_tokens, seed=0))


def step_until_each_has(engine: Engine, times: Times, count: int, num_tokens: int) -> None:
    while len(times.tokens) < count or min(map(len, times.tokens.values())) < num_tokens:
        engine.step()


def report(
    target_ms: float | None, alone: list[float], beside: list[float], figures: dict[str, float]
) -> dict[str, float]:
    figures |= {
        "median_gap_alone_ms": 1_000 * statistics.median(alone),
        "median_gap_ms": 1_000 * statistics.median(beside),
        "p99_gap_ms": 1_000 * statistics.quantiles(beside, n=100)[98],
        "worst_gap_ms": 1_000 * max(beside),
    }
    wanted = ""
    if target_ms is not None:
        figures["worst_over_target"] = figures["worst_gap_ms"] / target_ms
        wanted = f"; worst {figures['worst_over_target']:.2f} × the target (wanted below {MOST_OF_TARGET})"
    print(
        f"target {target_ms or 'none'} ms: gap alone {figures['median_gap_alone_ms']:.0f} ms, beside the prompt median "
        f"{figures['median_gap_ms']:.0f}, p99 {figures['p99_gap_ms']:.0f}, worst {figures['worst_gap_ms']:.0f} ms; "
        f"ttft {figures['ttft_s']:.1f} s in {figures['steps']} steps, {figures['floor_share']:.0%} at the floor; "
        f"{figures['cores']:.2f} cores{wanted}",
        flush=True,
    )
    return figures


if __name__ == "__main__":
    main()
