"""``octavo simulate`` from a trace to a table and a line of JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from octavo.cluster.cli import main


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Four prompts of three blocks, two and two alike in two of them."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 4000 * number,
            "input_length": 1500,
            "output_length": 5,
            "hash_ids": [first, first + 1, 90 + number],
        }
        for number, first in enumerate([10, 20, 10, 20])
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_policies_are_compared_in_a_table_and_in_json(trace: str) -> None:
    result = simulate("--trace", trace, "--policy", "cost", "--policy", "round_robin", "--groups", "3", "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output.splitlines()[-1])
    assert figures["infinite_cache_hit_rate"] == pytest.approx(4 / 12)
    assert figures["policies"]["cost"]["block_hit_rate"] == pytest.approx(4 / 12)
    assert figures["policies"]["round_robin"]["block_hit_rate"] == 0.0
    assert figures["conditions"]["groups"] == 3
    for name in ("cost", "round_robin", "infinite cache"):
        assert any(line.startswith(name) for line in result.output.splitlines())


def test_the_trace_is_repeated_compressed_and_cut(trace: str) -> None:
    result = simulate("--trace", trace, "--repeat", "2", "--num-requests", "6", "--speed", "10", "--json")
    figures = json.loads(result.output.splitlines()[-1])["policies"]["cost"]
    assert figures["num_requests"] == 6
    assert 2.0 < figures["duration_s"] < 3.0


def test_the_figure_and_the_page_need_nothing_else(trace: str, tmp_path: Path) -> None:
    png, html = tmp_path / "figure.png", tmp_path / "page.html"
    arguments = ("--trace", trace, "--policy", "cost", "--policy", "least_loaded")
    result = simulate(*arguments, "--plot", str(png), "--html", str(html))
    assert result.exit_code == 0, result.output
    assert png.read_bytes().startswith(b"\x89PNG")
    page = html.read_text()
    assert "<td>least_loaded</td>" in page
    assert "<th>max_num_batched_tokens</th><td>8192</td>" in page
    assert "Time to first token over the trace" in page
    assert not re.findall(r'(?:src|href)="(?!#)|url\((?!#)|@import|<script', page)


def test_events_get_lost_and_nothing_else(trace: str) -> None:
    result = simulate("--trace", trace, "--event-loss", "1", "--event-duplicate", "0.5", "--json")
    figures = json.loads(result.output.splitlines()[-1])
    assert figures["conditions"]["event_loss"] == 1.0
    assert figures["policies"]["cost"]["num_refused"] == 0


@pytest.mark.parametrize("flag", ["--plot", "--html"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(trace: str, tmp_path: Path, flag: str) -> None:
    for path, problem in ((tmp_path, "Is a directory"), (tmp_path / "none" / "x", "No such file or directory")):
        result = simulate("--trace", trace, flag, str(path))
        assert result.exit_code == 2
        assert f"octavo simulate: error: {flag}: {path}: {problem}" in result.output
        assert "policy" not in result.output
    mistaken = simulate("--trace", "nowhere", flag, str(tmp_path / "new"))
    assert mistaken.exit_code == 2
    assert not (tmp_path / "new").exists(), "what is only looked at is not left behind"


MISTAKES = {
    ("--trace", "nowhere"): "octavo simulate: error: nowhere: No such file or directory",
    ("--trace", "TRACE", "--kv-tokens", "1200"): (
        "octavo simulate: error: --kv-tokens: request 1 of trace.jsonl has 1505 tokens, but a group has room for 1200"
    ),
    ("--trace", "TRACE", "--kv-tokens", "8"): "octavo simulate: error: --kv-tokens: must be at least --block-size (16)",
    ("--trace", "TRACE", "--max-num-batched-tokens", "8"): (
        "octavo simulate: error: --max-num-batched-tokens: must be at least --max-num-seqs (256), got 8"
    ),
    ("--trace", "TRACE", "--prefixes", "nowhere"): "octavo simulate: error: nowhere: No such file",
    (
        "--trace",
        "TRACE",
        "--num-requests",
        "5",
    ): "octavo simulate: error: --num-requests: must be from 1 to the trace's 4",
    ("--trace", "TRACE", "--step-times", "nowhere"): "octavo simulate: error: --step-times: nowhere: No such file",
    ("--trace", "TRACE", "--speed", "inf"): "inf is not a finite number",
    ("--trace", "TRACE", "--slo-ttft", "nan"): "nan is not a finite number",
    ("--trace", "TRACE", "--policy", "best"): "'best' is not one of",
    ("--trace", "TRACE", "--event-loss", "1.5"): "1.5 is not in the range 0.0<=x<=1.0",
    ("--trace", "TRACE", "--event-reorder", "nan"): "nan is not a finite number",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_end_with_one_line_that_names_them(trace: str, arguments: tuple[str, ...]) -> None:
    result = simulate(*[trace if argument == "TRACE" else argument for argument in arguments])
    assert result.exit_code == 2
    assert MISTAKES[arguments] in result.output


def test_neither_torch_nor_ray_is_loaded(trace: str) -> None:
    program = f"""
import sys
from octavo.cluster.cli import main
main(["simulate", "--trace", {trace!r}], standalone_mode=False)
print("loaded:", [name for name in ("torch", "ray", "transformers", "pydantic") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "loaded: []"
