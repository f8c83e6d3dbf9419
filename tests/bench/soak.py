"""Many short requests that end in every way: is anything held after the last one, and does the process grow?

    python tests/bench/soak.py [--requests 20000] [--aborted 0.3] [--seed 0]

The engine is the real one; the executor is a stub on a virtual clock. A third of the requests begins like others, one
in ten wants several outputs, one in twenty is a beam search, one in twenty has a timeout, which most of them exceed,
and 30 % are aborted at a random moment, some of them a single output of several. The pool is so small that running
sequences are preempted. Every request must end exactly once; at the end the invariants are proved.

Resident memory is sampled after each 1 % of the requests, after ``gc.collect()``. Compared are the means of the last
quarter and of the second: the first fills the cache.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import time

import psutil
from fake_executor import BLOCK_SIZE, ORDINARY_TOKEN, STOP_TOKEN, FakeExecutor, hasher

from octavo.worker.engine import Engine
from octavo.worker.messages import Branch, FinishReason, Request, SamplingParams, SequenceUpdate
from octavo.worker.scheduler import Scheduler, SchedulerLimits

NUM_LIVE = 48
"""Requests under way at a time."""
NUM_BLOCKS, MAX_NUM_SEQS, BUDGET = 320, 32, 256
MOST_OUTPUT_TOKENS = 48
NUM_PREFIXES, MOST_PREFIX_BLOCKS = 20, 6
SEVERAL_SHARE, BEAM_SHARE, TIMEOUT_SHARE, PREFIX_SHARE, ONE_BRANCH_SHARE = 0.1, 0.05, 0.05, 1 / 3, 0.5
TIMEOUT_S = 0.2
"""Virtual; enough for some ten of the fifty steps that a request may take."""
NUM_SAMPLES = 100
MOST_GROWTH = 0.02


class Soak:
    def __init__(self, args: argparse.Namespace) -> None:
        self.rng = random.Random(args.seed)
        self.num_requests, self.aborted_share = args.requests, args.aborted
        self.num_submitted = 0
        self.open_branches: dict[str, set[int]] = {}
        self.abort_at: dict[int, list[tuple[str, int | None]]] = {}
        """Step → what is aborted before it."""
        self.num_aborts = 0
        self.samples: list[int] = []
        limits = SchedulerLimits(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=BUDGET,
            max_model_len=1_024,
            plans_ahead=True,
        )
        self.scheduler = Scheduler(limits, hasher())
        self.executor = FakeExecutor()
        self.engine = Engine(self.scheduler, self.executor, clock=self.executor.clock, emit=self.note)

    def run(self) -> None:
        step = 0
        while self.num_submitted < self.num_requests or self.engine.has_work:
            self.top_up(step)
            for name, branch in self.abort_at.pop(step, ()):
                self.num_aborts += name in self.open_branches
                self.engine.abort(name, branch=branch)
            self.engine.step()
            self.engine.drain_progress()
            self.scheduler.drain_events()
            step += 1

    def top_up(self, step: int) -> None:
        while self.num_submitted < self.num_requests and self.engine.num_requests < NUM_LIVE:
            request = self.request(self.num_submitted)
            self.open_branches[request.request_id] = {branch.index for branch in request.branches}
            self.engine.submit(request)
            if self.rng.random() < self.aborted_share:
                at = step + self.rng.randint(0, request.sampling.seed)
                self.abort_at.setdefault(at, []).append(self.victim(request))
            self.num_submitted += 1
            if self.num_submitted % (self.num_requests // NUM_SAMPLES) == 0:
                self.sample()

    def victim(self, request: Request) -> tuple[str, int | None]:
        is_one = len(request.branches) > 1 and self.rng.random() < ONE_BRANCH_SHARE
        return request.request_id, self.rng.choice(request.branches).index if is_one else None

    def request(self, index: int) -> Request:
        rng = self.rng
        prompt = [rng.randint(3, 30_000) for _ in range(rng.randint(1, 160))]
        if rng.random() < PREFIX_SHARE:
            prefix = rng.randrange(NUM_PREFIXES)
            prompt = [100 + prefix] + [ORDINARY_TOKEN] * (BLOCK_SIZE * rng.randint(1, MOST_PREFIX_BLOCKS) - 1) + prompt
        kind, num_branches, beam_width = rng.random(), 1, None
        if kind < BEAM_SHARE:
            beam_width, num_branches = 4, rng.choice((1, 4))
        elif kind < BEAM_SHARE + SEVERAL_SHARE:
            num_branches = rng.randint(2, 4)
        sampling = SamplingParams(
            max_tokens=MOST_OUTPUT_TOKENS,
            seed=rng.randint(1, MOST_OUTPUT_TOKENS),
            stop_token_ids=(STOP_TOKEN,),
            beam_width=beam_width,
        )
        return Request(
            str(index),
            "gateway",
            "model",
            tuple(prompt),
            b"",
            sampling,
            tuple(Branch(number) for number in range(num_branches)),
            priority=rng.choice((0, 0, 0, 1)),
            timeout_s=TIMEOUT_S if rng.random() < TIMEOUT_SHARE else None,
        )

    def note(self, gateway_id: str, update: SequenceUpdate) -> None:
        """Raises KeyError when a branch goes on, or ends again, after its end."""
        open_branches = self.open_branches[update.request_id]
        if update.finish_reason is None:
            return
        open_branches.remove(update.branch)
        if not open_branches:
            del self.open_branches[update.request_id]

    def sample(self) -> None:
        gc.collect()
        self.samples.append(psutil.Process().memory_info().rss)

    def growth(self) -> float:
        """Of resident memory, from the second quarter to the last."""
        quarter = len(self.samples) // 4
        second, last = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        return statistics.mean(last) / statistics.mean(second) - 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--aborted", type=float, default=0.3, help="share of requests")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.requests < NUM_SAMPLES:
        parser.error(f"--requests must be at least {NUM_SAMPLES}, got {args.requests}")
    soak, started = Soak(args), time.perf_counter()
    soak.run()
    seconds = time.perf_counter() - started
    soak.scheduler.check()
    report(args, soak, seconds)


def report(args: argparse.Namespace, soak: Soak, seconds: float) -> None:
    finished = {reason.value: count for reason, count in soak.engine.counters.finished.items() if count}
    counters, pool = soak.scheduler.counters, soak.scheduler.pool
    print(
        f"{args.requests} requests in {seconds:.0f} s, {soak.num_aborts} aborted while under way; outputs: {finished}"
    )
    print(
        f"{counters.num_preemptions} preemptions, {counters.num_forks} forks, {counters.num_copied_blocks} copies, "
        f"{counters.num_cached_prompt_tokens / counters.num_queried_prompt_tokens:.0%} of prompt tokens were cached"
    )
    print(f"after the last: {pool.num_held_blocks} blocks held, {len(soak.open_branches)} requests without an end")
    megabytes = [round(sample / 2**20, 1) for sample in soak.samples[:: max(len(soak.samples) // 10, 1)]]
    print(f"resident MiB: {megabytes}; growth {soak.growth():+.2%} (wanted at most {MOST_GROWTH:.0%})")
    figures = {
        "held_blocks": pool.num_held_blocks,
        "without_end": len(soak.open_branches),
        "resident_growth": soak.growth(),
        "resident_mib": megabytes,
        "finished": finished,
        "steps": soak.engine.counters.num_steps,
        "preemptions": counters.num_preemptions,
        "forks": counters.num_forks,
        "seconds": round(seconds, 1),
        "errors": soak.engine.counters.finished[FinishReason.ERROR],
    }
    conditions = {
        "requests": args.requests,
        "aborted": args.aborted,
        "seed": args.seed,
        "blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": MAX_NUM_SEQS,
        "budget": BUDGET,
        "python": platform.python_version(),
    }
    print(json.dumps({"conditions": conditions, "figures": figures}))


if __name__ == "__main__":
    main()
