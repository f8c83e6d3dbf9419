"""Everything that needs a GPU, one script after the other, each in a process of its own and within its seconds.

A kernel that reaches where it must not spoils its process and no other. What does not fit into the whole budget is left
out, and said to be. The last line is JSON with all figures; the exit code is 1 when anything failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATH = [str(ROOT / ".ci" / "types"), str(ROOT / "tests" / "support")]
GRACE_S = 20.0
"""A script that is over its seconds may still end what it has begun."""


@dataclass(frozen=True)
class Script:
    name: str
    seconds: float
    """On a GPU, compilation included."""
    command: tuple[str, ...]
    takes_seconds: bool = True
    may_be_cut: bool = False
    """Being ended for lack of time is no failure."""
    tiny: tuple[str, ...] | None = ("--tiny",)
    """What makes it small. None: not run then."""
    needs: tuple[str, ...] = ()
    """Packages without which it is left out."""


def gpu_script(name: str, seconds: float) -> Script:
    return Script(name, seconds, (str(HERE / f"{name}.py"),))


KERNEL_TESTS = ("-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir=tests/kernels", "-k", "triton")
SUBJECTS = ("attention", "cache", "elementwise", "quantized_linear", "sample")
SCRIPTS = (
    gpu_script("check_kernels", 130.0),
    gpu_script("engine_check", 60.0),
    gpu_script("attention_speed", 75.0),
    gpu_script("engine_speed", 130.0),
    Script("kernels", 40.0, (str(ROOT / "tests" / "bench" / "kernels.py"),)),
    # The tests of tests/kernels alone: those above them need all of Octavo.
    Script(
        "kernel tests",
        480.0,
        (*KERNEL_TESTS, *(f"tests/kernels/test_{subject}.py" for subject in SUBJECTS)),
        takes_seconds=False,
        may_be_cut=True,
        tiny=None,
        needs=("pytest", "hypothesis"),
    ),
)


@dataclass
class Outcome:
    result: dict[str, Any]
    failed: list[str]
    left_out: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--seconds", type=float, default=460.0, help="for everything")
    args = parser.parse_args()
    begin_s = time.monotonic()
    results: dict[str, Any] = {}
    failed, left_out = [], []
    for script in SCRIPTS:
        if args.tiny and script.tiny is None:
            continue
        if missing := [name for name in script.needs if importlib.util.find_spec(name) is None]:
            left_out.append(f"{script.name}: needs {', '.join(missing)}")
            continue
        left_s = args.seconds - (time.monotonic() - begin_s)
        if left_s < GRACE_S:
            left_out.append(script.name)
            continue
        seconds = left_s - GRACE_S / 2 if args.device == "cpu" else min(script.seconds, left_s - GRACE_S / 2)
        outcome = run(script, args.device, args.tiny, seconds, left_s)
        results[script.name] = outcome.result
        failed += [f"{script.name}: {line}" for line in outcome.failed]
        left_out += [f"{script.name}: {line}" for line in outcome.left_out]
    seconds = round(time.monotonic() - begin_s, 1)
    print(f"\n{len(failed)} failed, {len(left_out)} left out, {seconds:.0f} s")
    for line in failed:
        print(f"FAILED  {line}")
    print(json.dumps({"seconds": seconds, "failed": failed, "left_out": left_out, "results": results}))
    sys.exit(1 if failed else 0)


def run(script: Script, device: str, tiny: bool, seconds: float, left_s: float) -> Outcome:
    command = [sys.executable, *script.command]
    if script.tiny is not None:
        command += ["--device", device, *(script.tiny if tiny else ())]
    if script.takes_seconds:
        command += ["--seconds", f"{seconds:.0f}"]
    print(f"\n=== {script.name}, up to {seconds:.0f} s", flush=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATH), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(min(seconds + GRACE_S, left_s), process.kill)
    timer.start()
    last = echo(process)
    code = process.wait()
    was_cut = not timer.is_alive()
    timer.cancel()
    return outcome_of(script, last, code, was_cut=was_cut)


def echo(process: subprocess.Popen[str]) -> str:
    """Shows what it prints, but for the line of JSON; the last line."""
    last = ""
    for line in process.stdout or ():
        last = line
        if not line.startswith("{"):
            print(line, end="", flush=True)
    return last


def outcome_of(script: Script, last: str, code: int, *, was_cut: bool) -> Outcome:
    if was_cut:
        lists = ([], ["ended for lack of time"]) if script.may_be_cut else (["ended for lack of time"], [])
        return Outcome({}, *lists)
    try:
        result = json.loads(last)
    except ValueError:
        return Outcome({}, [f"exit code {code}"] if code else [], [])
    failed, left_out = result.pop("failed", []), result.pop("left_out", [])
    return Outcome(result, failed or ([f"exit code {code}"] if code else []), left_out)


if __name__ == "__main__":
    main()
