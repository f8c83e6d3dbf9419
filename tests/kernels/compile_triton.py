"""Compiles Triton kernels without a GPU and prints what each takes: ``python compile_triton.py sm_80 gfx942``.

A kernel that is ``hot`` must not spill registers, and none may need more shared memory than the target has. Exit code 1
names those that do. Which kernels: see triton_cases.py.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from triton_cases import CASES
from triton_usage import TARGETS, Case, compile_case

SHARED_MEMORY_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""What one program may have."""


def report(target: str) -> tuple[str, list[str]]:
    """A table of what the kernels take, and the names of those that take too much, or do not compile."""
    lines, failed = [target], []
    for case in (case for cases in CASES for case in cases(target)):
        verdict, passed = judge(case, target)
        lines.append(f"  {case.name:36} {verdict}")
        failed += [] if passed else [f"{target} {case.name}"]
    return "\n".join(lines), failed


def judge(case: Case, target: str) -> tuple[str, bool]:
    try:
        usage = compile_case(case, TARGETS[target])
    except Exception as error:
        return f"DOES NOT COMPILE: {error}".replace("\n", "\n    "), False
    too_much = (case.hot and usage.spilled > 0) or usage.shared_bytes > SHARED_MEMORY_BYTES[target]
    takes = f"{usage.registers:4} registers {usage.shared_bytes / 1024:6.1f} KiB shared {usage.spilled:5} spilled"
    return takes + "  TOO MUCH" * too_much, not too_much


def main(targets: list[str]) -> int:
    failed: list[str] = []
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("fork")) as pool:
        for table, names in pool.map(report, targets):
            print(table, flush=True)
            failed += names
    print(f"failed: {', '.join(failed)}" if failed else "all fit")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
