"""How long steps of a real engine take, for ``octavo simulate --step-times``; and how well its cost model fits them.

    python tests/bench/step_times.py > steps.txt
    octavo simulate --trace trace.jsonl --step-times steps.txt

Rounds of random requests run on an engine in this process: 1 to ``--max-num-seqs`` at once, prompts of 1 to
``--max-prompt-tokens``, nothing cached. A step counts from the end of the one before it to its own, as in the
simulator. The cost model is fitted to every other round and compared with the measured steps of the rest: the median of
the relative errors, and the error of the sum of all times, which is what a simulated cluster's throughput depends on.

The last line is JSON: ``steps`` has a row for each step of all rounds, num_prefill_tokens, num_context_tokens,
num_decodes, num_kv_tokens and seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from in_process import Bench, add_model_arguments, find_model, make_spec

from octavo.router.simulator.step_times import StepShape, StepTimes, fit, shape_of
from octavo.worker.engine import Engine
from octavo.worker.messages import Request, SamplingParams
from octavo.worker.step_plan import StepPlan

Row = tuple[int, int, int, int, float]

MOST_OUTPUT_TOKENS = 24
TOKEN_IDS = range(100, 1000)


def main() -> None:
    args = parse_arguments()
    model_dir = find_model(args)
    spec = make_spec(
        model_dir,
        args.dtype,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_prompt_tokens + MOST_OUTPUT_TOKENS,
        num_blocks=None,
    )
    bench = Bench.load(replace(spec, enable_prefix_caching=False), model_dir)
    rng = random.Random(args.seed)
    run_round(bench, args, rng)  # warms up
    rounds = [run_round(bench, args, rng) for _ in range(args.rounds)]
    show_errors([row for rows in rounds[::2] for row in rows], [row for rows in rounds[1::2] for row in rows])
    conditions = bench.conditions() | {"rounds": args.rounds, "seed": args.seed}
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    print(json.dumps({"conditions": conditions, "steps": [row for rows in rounds for row in rows]}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--max-prompt-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def run_round(bench: Bench, args: argparse.Namespace, rng: random.Random) -> list[Row]:
    """The steps of a few requests that come at once, in order."""
    shapes: list[StepShape] = []

    def observe(engine: Engine, plan: StepPlan) -> None:
        shapes.append(shape_of(plan))

    engine = bench.engine(lambda gateway, update: None, observe)
    for number in range(2 ** rng.randint(0, args.max_num_seqs.bit_length() - 1)):
        prompt = [rng.choice(TOKEN_IDS) for _ in range(rng.randint(1, args.max_prompt_tokens))]
        sampling = SamplingParams(rng.randint(2, MOST_OUTPUT_TOKENS), seed=0, temperature=0.0)
        engine.submit(Request(str(number), "bench", "bench", tuple(prompt), b"", sampling))
    ends_s: list[float] = []
    while engine.step():  # launches a step, and waits for the one before it
        ends_s.append(time.perf_counter())
    return [(*shape, end_s - begin_s) for shape, begin_s, end_s in zip(shapes, ends_s, ends_s[1:], strict=False)]


def show_errors(fitted_to: Sequence[Row], others: Sequence[Row]) -> None:
    times = fit(fitted_to)
    print(times)
    kinds = {
        "steps that only decode": [row for row in others if row[0] == 0],
        "steps with prefill": [row for row in others if row[0]],
        "all steps": others,
    }
    for kind, rows in kinds.items():
        if rows:
            print(f"{kind}: {describe(times, rows)}")


def describe(times: StepTimes, rows: Sequence[Row]) -> str:
    """Errors of the prediction."""
    pairs = [(times.step_s(StepShape(*row[:4])), row[4]) for row in rows]
    median = statistics.median(abs(predicted / measured - 1) for predicted, measured in pairs)
    total = sum(predicted for predicted, _ in pairs) / sum(measured for _, measured in pairs) - 1
    return f"{len(rows)} of them, median error {median:.1%}, error of the sum {total:+.1%}"


if __name__ == "__main__":
    main()
