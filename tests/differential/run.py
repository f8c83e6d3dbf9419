"""Random requests on the real model in a tiny KV pool, each compared with a run alone.

    python tests/differential/run.py --requests 50000 [--seed 0] [--round 250] [--alone-every 50]

Prints progress, what happened, and every mismatch with the command that repeats its round. The last line is JSON; the
exit code is 1 when an output was wrong, when more were excused by near-ties than rounding explains, or when a long run
did not reach what it is to test.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter

import platformdirs
from differential import MOST_EXCUSED, Round, not_reached
from judge import Judge
from lab import Lab
from random_requests import Text

from octavo.worker.checkpoint import resolve_model

FEWEST_REQUESTS = 1000
"""A run of so many must have reached everything; a shorter one may repeat what went wrong in one round."""


def main() -> int:
    args = parse_args()
    lab = Lab(resolve_model(None, cache_dir=platformdirs.user_cache_path("octavo"), report=print).path)
    text, judge, totals, num_wrong = Text(lab), Judge(lab), Counter[str](), 0
    started = time.perf_counter()
    for seed in range(args.seed, args.seed + -(-args.requests // args.round)):
        left = args.requests - totals["requests"]
        num_wrong += run_round(Round(lab, text, seed, min(args.round, left)), judge, totals, args.alone_every)
        rate = totals["requests"] / (time.perf_counter() - started)
        print(
            f"seed {seed}: {totals['requests']} requests, {rate:.1f}/s, {num_wrong} wrong, {dict(totals)}", flush=True
        )
    judge.close()
    excused = totals["near-tie"] / max(totals["outputs"], 1)
    missing = not_reached(totals) if args.requests >= FEWEST_REQUESTS else {}
    is_good = num_wrong == 0 and excused <= MOST_EXCUSED and not missing
    seconds = round(time.perf_counter() - started, 1)
    report = {"ok": is_good, "wrong": num_wrong, "excused": excused, "not_reached": missing, "seconds": seconds}
    print(json.dumps(report | {"totals": totals}))
    return 0 if is_good else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; those after it count on")
    parser.add_argument("--round", type=int, default=250, help="requests that one engine serves")
    parser.add_argument("--alone-every", type=int, default=50, help="one of so many requests is also run truly alone")
    return parser.parse_args()


def run_round(this: Round, judge: Judge, totals: Counter[str], alone_every: int) -> int:
    """How many outputs were wrong; an engine that failed counts as one."""
    try:
        this.judge(judge, this.serve(), alone_every=alone_every)
    except Exception:
        traceback.print_exc()
        this.wrong.append(f"seed {this.seed}: failed, {this.setup}\n  repeat: {this.command(len(this.requests))}")
    for excused in this.excused:
        print(f"NEAR-TIE: {excused}", flush=True)
    for wrong in this.wrong:
        print(f"WRONG: {wrong}", flush=True)
    totals.update(this.totals)
    totals["run alone"] = judge.num_run_alone
    return len(this.wrong)


if __name__ == "__main__":
    sys.exit(main())
