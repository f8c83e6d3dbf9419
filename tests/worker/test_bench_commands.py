"""The benchmarks that need no model run, and end with one line of JSON; small runs reach what large ones must."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[1] / "bench"


def figures_of(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCH / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["figures"]
    return figures


def test_a_common_prefix_is_computed_once() -> None:
    figures = figures_of("shared_prefix.py", "--requests", "8", "--budget", "512")
    assert figures["computed_tokens"] == 1_008 + 8 * 32


def test_nothing_is_held_after_requests_that_end_in_every_way() -> None:
    figures = figures_of("soak.py", "--requests", "120")
    assert (figures["held_blocks"], figures["without_end"], figures["errors"]) == (0, 0, 0)
    assert figures["preemptions"] > 0
    assert figures["forks"] > 0


def test_memory_is_full_at_saturation(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f",{100 + 37 * index % 900},{20 + 13 * index % 80}" for index in range(120)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    figures = figures_of("memory.py", "--trace", str(trace), "--blocks", "600")
    assert figures["blocks_held_after"] == 0
    assert figures["occupancy"] > 0.8
    assert figures["waste"] < 0.02
