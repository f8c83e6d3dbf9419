"""How well KV memory is used at saturation, with the lengths of a real trace.

    python tests/bench/memory.py [--trace FILE] [--requests 19366] [--blocks 8192] [--budget 2048]

The lengths of prompts and outputs are those of the Azure trace of conversations (2023), in its order; arrival times are
not: there are always some that wait. No two prompts begin alike. The engine is the real one; it plans ahead, and learns
that an output ends when the stop token is drawn: nobody tells it the length before, and max_tokens is all that the
context leaves. The executor is a stub: a step takes a virtual 10 ms and 0.05 ms for each token.

Everything is the mean over the steps of the saturated part: from when a tenth of the requests has ended until the last
one was submitted. It is taken when a step has been planned, with the tokens of this step as computed.

    waste         slots of held blocks without a computed token, as a share of the slots of held blocks; a block that
                  several tables name counts once
    occupancy     held blocks, as a share of the pool
    given up      computed tokens of preempted sequences; many are found again in the prefix cache
    recomputed    tokens computed that had been computed before
    reservation   sequences that fit if each reserves the trace's longest prompt and output
    own length    the same if each reserved its own final length, which nobody knows before:
                  pool × Σ output / Σ (output × length)

The last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fake_executor import BLOCK_SIZE, ORDINARY_TOKEN, STOP_TOKEN, FakeExecutor, hasher

from octavo.worker.engine import Engine
from octavo.worker.messages import Request, SamplingParams, SequenceUpdate
from octavo.worker.routing_hash import pack_hashes
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.step_plan import StepPlan

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "azure2023_conv.csv.gz"
LEAST_WAITING = 64
"""Requests; more are submitted when fewer wait."""
RAMP_UP_SHARE = 0.1
"""Of the requests; they end before the saturated part begins."""
MOST_WASTE, LEAST_OCCUPANCY, LEAST_BATCH_RATIO = 0.007, 0.95, 10.0


@dataclass(frozen=True)
class Lengths:
    """In tokens."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass
class Sums:
    """Over the steps of the saturated part; blocks and tokens."""

    num_steps: int = 0
    held_blocks: int = 0
    unused_slots: int = 0
    running: int = 0
    in_step: int = 0
    tokens: int = 0
    recomputed: int = 0
    fenced_blocks: int = 0
    head_room_blocks: int = 0


def main() -> None:
    args = parse_args()
    trace = list(read_trace(args.trace))
    longest = max(lengths.total for lengths in trace)
    trace = trace[: args.requests]
    started = time.perf_counter()
    figures = Replay(trace, longest, args).run()
    figures["wall_s"] = round(time.perf_counter() - started, 1)
    conditions = {
        "trace": args.trace.name,
        "requests": len(trace),
        "longest_tokens": longest,
        "blocks": args.blocks,
        "block_size": BLOCK_SIZE,
        "budget": args.budget,
        "max_num_seqs": args.max_num_seqs,
        "policy": "priority",
        "python": platform.python_version(),
    }
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    print_figures(figures)
    print(json.dumps({"conditions": conditions, "figures": figures}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trace", type=Path, default=TRACE, help="CSV, or gzip of it, with ContextTokens and GeneratedTokens"
    )
    parser.add_argument("--requests", type=int, help="use only the first of the trace")
    parser.add_argument("--blocks", type=int, default=8_192, help="blocks of the pool")
    parser.add_argument("--budget", type=int, default=2_048, help="tokens of a step")
    parser.add_argument("--max-num-seqs", type=int, default=1_024)
    return parser.parse_args()


def read_trace(path: Path) -> Iterator[Lengths]:
    is_packed = path.suffix == ".gz"
    with gzip.open(path, "rt", newline="") if is_packed else path.open(newline="") as file:
        for row in csv.DictReader(file):
            yield Lengths(int(row["ContextTokens"]), int(row["GeneratedTokens"]))


class Replay:
    def __init__(self, trace: list[Lengths], longest: int, args: argparse.Namespace) -> None:
        self.trace = trace
        self.longest = longest
        self.pool_tokens = args.blocks * BLOCK_SIZE
        self.hasher = hasher()
        self.sums = Sums()
        self.num_submitted = self.num_ended = 0
        self.computed_before: dict[str, int] = {}
        limits = SchedulerLimits(
            num_blocks=args.blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.budget,
            max_model_len=self.longest,
            plans_ahead=True,
        )
        self.scheduler = Scheduler(limits, self.hasher)
        executor = FakeExecutor()
        executor.observe = self.observe
        self.engine = Engine(self.scheduler, executor, clock=executor.clock, emit=self.note_end)

    def run(self) -> dict[str, float]:
        counters = self.scheduler.counters
        before: tuple[int, int] | None = None
        self.top_up()
        while self.num_submitted < len(self.trace):
            if before is None and self.is_saturated:
                before = counters.num_preemptions, counters.num_recomputed_tokens
            self.step()
        if before is None:
            raise SystemExit(f"{len(self.trace)} requests are too few: the run is never saturated")
        preemptions, given_up = counters.num_preemptions - before[0], counters.num_recomputed_tokens - before[1]
        while self.engine.has_work:
            self.step()
        self.scheduler.check()
        return self.figures(preemptions, given_up) | {"blocks_held_after": self.scheduler.pool.num_held_blocks}

    def step(self) -> None:
        self.engine.step()
        self.scheduler.drain_events()
        self.engine.drain_progress()
        self.top_up()

    def top_up(self) -> None:
        while self.num_submitted < len(self.trace) and self.scheduler.num_waiting < LEAST_WAITING:
            self.engine.submit(self.request(self.num_submitted))
            self.num_submitted += 1

    def request(self, index: int) -> Request:
        lengths = self.trace[index]
        # Its first token is its own, so that nothing of it is found in the prefix cache.
        prompt = (1_000 + index, *[ORDINARY_TOKEN] * (lengths.prompt - 1))
        sampling = SamplingParams(self.longest - lengths.prompt, seed=lengths.output, stop_token_ids=(STOP_TOKEN,))
        hashes = pack_hashes(self.hasher.hash_blocks(prompt))
        return Request(str(index), "gateway", "model", prompt, hashes, sampling)

    def note_end(self, gateway_id: str, update: SequenceUpdate) -> None:
        if update.finish_reason is not None:
            self.num_ended += 1
            self.computed_before.pop(update.request_id, None)

    @property
    def is_saturated(self) -> bool:
        return self.num_ended >= RAMP_UP_SHARE * len(self.trace) and self.num_submitted < len(self.trace)

    def observe(self, plan: StepPlan) -> None:
        recomputed = self.note_computed(plan)
        if not self.is_saturated:
            return
        sums, scheduler = self.sums, self.scheduler
        sums.num_steps += 1
        sums.held_blocks += scheduler.pool.num_held_blocks
        sums.unused_slots += self.num_unused_slots()
        sums.running += scheduler.num_running
        sums.in_step += plan.slots.size
        sums.tokens += plan.token_ids.size
        sums.recomputed += recomputed
        sums.fenced_blocks += scheduler.pool.num_fenced_blocks
        sums.head_room_blocks += scheduler.num_head_room_blocks

    def num_unused_slots(self) -> int:
        """Of blocks that are not full. In each the table counts that has computed most of it."""
        used: dict[int, int] = {}
        for sequence in self.scheduler.running:
            computed = sequence.num_computed_tokens
            for index in range(computed // BLOCK_SIZE, len(sequence.block_table)):
                block = sequence.block_table[index]
                used[block] = max(used.get(block, 0), computed - index * BLOCK_SIZE, 0)
        return sum(BLOCK_SIZE - slots for slots in used.values())

    def note_computed(self, plan: StepPlan) -> int:
        """How many tokens of this step had been computed before."""
        recomputed = 0
        names = {sequence.slot: sequence.request.request_id for sequence in self.scheduler.running}
        parts = plan.slots.tolist(), plan.num_computed_tokens.tolist(), plan.num_new_tokens.tolist()
        for slot, start, count in zip(*parts, strict=True):
            name, end = names[slot], start + count
            known = self.computed_before.get(name, 0)
            recomputed += max(0, min(known, end) - start)
            self.computed_before[name] = max(known, end)
        return recomputed

    def figures(self, preemptions: int, given_up: int) -> dict[str, float]:
        sums, steps = self.sums, self.sums.num_steps
        pool_blocks = self.pool_tokens // BLOCK_SIZE
        reservation = self.pool_tokens // self.longest
        own = sum(each.output for each in self.trace) / sum(each.output * each.total for each in self.trace)
        return {
            "steps": steps,
            "waste": sums.unused_slots / (sums.held_blocks * BLOCK_SIZE),
            "occupancy": sums.held_blocks / (steps * pool_blocks),
            "mean_batch": sums.running / steps,
            "mean_sequences_in_step": sums.in_step / steps,
            "reservation_batch": reservation,
            "batch_ratio": sums.running / steps / reservation,
            "own_length_batch": own * self.pool_tokens,
            "preemptions": preemptions,
            "given_up_tokens": given_up,
            "recomputed_tokens": sums.recomputed,
            "recomputed_share": sums.recomputed / sums.tokens,
            "tokens_per_step": sums.tokens / steps,
            "head_room": sums.head_room_blocks / (steps * pool_blocks),
            "fenced": sums.fenced_blocks / (steps * pool_blocks),
        }


def print_figures(figures: dict[str, float]) -> None:
    print(f"saturated for {figures['steps']:.0f} steps of {figures['tokens_per_step']:.0f} tokens on average")
    print(f"waste {figures['waste']:.3%} of what is held (wanted at most {MOST_WASTE:.1%})")
    print(
        f"occupancy {figures['occupancy']:.2%} of the pool (wanted at least {LEAST_OCCUPANCY:.0%}); "
        f"head-room {figures['head_room']:.2%}, fenced {figures['fenced']:.2%}"
    )
    print(
        f"mean batch {figures['mean_batch']:.1f}, {figures['batch_ratio']:.1f} × the "
        f"{figures['reservation_batch']:.0f} of reservation (wanted at least {LEAST_BATCH_RATIO:.0f} ×); "
        f"own length {figures['own_length_batch']:.1f}"
    )
    print(
        f"{figures['preemptions']:.0f} preemptions, {figures['given_up_tokens']:.0f} computed tokens given up, "
        f"{figures['recomputed_tokens']:.0f} recomputed: {figures['recomputed_share']:.2%} of those computed"
    )


if __name__ == "__main__":
    main()
