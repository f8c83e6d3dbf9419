"""Traces are read whole, judged line by line, and scaled without changing what prompts have in common."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.router.simulator.trace_files import read_trace
from octavo.router.simulator.traces import Trace, TraceError, TraceRequest
from octavo.worker.errors import ConfigurationError

MOONCAKE = """\
{"timestamp": 0, "input_length": 600, "output_length": 6, "hash_ids": [46, 47]}
{"timestamp": 250, "input_length": 1024, "output_length": 4, "hash_ids": [46, 99]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:17:03.9799600,4808,10\r
2023-11-16 18:17:04.0319600,3180,8\r
"""
RECORDED = """\
{"octavo_trace": 1, "block_size": 16}
{"arrival_s": 0.5, "num_prompt_tokens": 40, "num_output_tokens": 7, "hashes": [18446744073709551615, 5]}
{"arrival_s": 0.5, "num_prompt_tokens": 15, "num_output_tokens": 1, "hashes": []}
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def create(text: str, name: str = "trace.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode())
        return path

    return create


def test_mooncake(write: Callable[..., Path]) -> None:
    trace = read_trace(write(MOONCAKE))
    assert trace == Trace("trace.jsonl", 512, (TraceRequest(0.0, 600, 6, (0, 1)), TraceRequest(0.25, 1024, 4, (0, 2))))
    assert trace.infinite_cache_hit_rate() == 1 / 4


def test_azure(write: Callable[..., Path]) -> None:
    trace = read_trace(write(AZURE, "trace.csv"))
    assert trace.requests == (TraceRequest(0.0, 4808, 10), TraceRequest(0.052, 3180, 8))
    assert trace.infinite_cache_hit_rate() == 0.0


def test_recorded(write: Callable[..., Path]) -> None:
    trace = read_trace(write(RECORDED))
    assert trace.block_size == 16
    assert trace.requests == (TraceRequest(0.5, 40, 7, (0, 1)), TraceRequest(0.5, 15, 1))


def test_compressed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(MOONCAKE.encode()))
    assert len(read_trace(path).requests) == 2


MISTAKES = {
    MOONCAKE.replace('"timestamp": 250', '"timestamp": -1'): r"line 2: the arrival must be a time ≥ 0, got -0.001",
    MOONCAKE.replace('"timestamp": 0', '"timestamp": 9000'): r"line 2: it arrives at 0.25 s, before the request above",
    MOONCAKE.replace('"timestamp": 250', '"timestamp": true'): r"line 2: the arrival must be a time",
    MOONCAKE.replace('"timestamp": 250', '"timestamp": NaN'): r"line 2: not JSON",
    MOONCAKE.replace('"timestamp": 250', '"timestamp": 1e999'): r"line 2: (not JSON|the arrival must be a time)",
    MOONCAKE.replace('"timestamp": 250', '"time": 250'): r"line 2: timestamp missing",
    MOONCAKE.replace("1024", "1025"): r"line 2: 1025 prompt tokens are 3 blocks of 512, but 2 are given",
    MOONCAKE.replace("1024", "0"): r"line 2: prompt tokens must be a number from 1 to \d+, got 0",
    MOONCAKE.replace("1024", "1e3"): r"line 2: prompt tokens must be a number",
    MOONCAKE.replace(": 4,", ": -4,"): r"line 2: output tokens must be a number",
    MOONCAKE.replace("[46, 99]", "[99, 46]"): r"line 2: block 46 follows another block than it did before",
    MOONCAKE.replace("[46, 99]", '[46, "x"]'): r"line 2: the blocks must be a list of whole numbers, got \[46, 'x'\]",
    MOONCAKE.replace("[46, 99]", "46"): r"line 2: the blocks must be a list",
    MOONCAKE[:-20]: r"line 2: not JSON, or cut off",
    "[1]\n": r"line 1: a JSON object is expected, got \[1\]",
    "": r"line 1: not JSON",
    AZURE.replace("ContextTokens,", ""): r"line 1: the columns must be TIMESTAMP,ContextTokens,GeneratedTokens",
    AZURE.replace("3180", "-3180"): r"line 3: prompt tokens must be a number from 1 to \d+, got '-3180'",
    AZURE.replace("2023-11-16 18:17:04", "yesterday"): r"line 3: 'yesterday.0319600' is not a time",
    AZURE.replace(",8\r", "\r"): r"line 3: 3 columns are expected, got 2",
    AZURE.replace("18:17:04", "18:17:02"): r"line 3: the arrival must be a time ≥ 0, got -1\.9",
    AZURE.partition("\n")[0]: r"line 1: the trace holds no request",
    RECORDED.replace('trace": 1', 'trace": 2'): r"line 1: version 2 is not known; this reads version 1",
    RECORDED.replace('size": 16', 'size": 0'): r"line 1: block_size must be from 1 to 65536, got 0",
    RECORDED.replace(", 5]", "]"): r"line 2: 40 prompt tokens are 2 blocks of 16, but 1 are given",
    RECORDED.replace('"num_output_tokens": 1, ', ""): r"line 3: num_output_tokens missing",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_named_by_file_and_line(write: Callable[..., Path], text: str) -> None:
    with pytest.raises(TraceError, match=f"{write(text)}, {MISTAKES[text]}"):
        read_trace(write(text))


def test_a_file_cut_off_while_compressed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(MOONCAKE.encode())[:-12])
    with pytest.raises(TraceError, match="the compressed file is damaged or cut off"):
        read_trace(path)


def test_what_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(MOONCAKE.encode() + b"\xff\xfe\n")
    with pytest.raises(TraceError, match="line 3: the text is not UTF-8"):
        read_trace(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        read_trace(tmp_path / "trace.jsonl")


def test_faster_compresses_time_from_the_first_arrival_on(write: Callable[..., Path]) -> None:
    trace = read_trace(write(MOONCAKE.replace('"timestamp": 0', '"timestamp": 50')))
    assert [request.arrival_s for request in trace.faster(4.0).requests] == [0.0, pytest.approx(0.05)]


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_speed(write: Callable[..., Path], speed: float) -> None:
    with pytest.raises(ConfigurationError, match="--speed"):
        read_trace(write(MOONCAKE)).faster(speed)


def test_repetitions_are_new_prompts_with_the_same_sharing(make_trace: Callable[..., Trace]) -> None:
    trace = make_trace(random.Random(0), 30)
    repeated = trace.repeated(3)
    assert repeated.infinite_cache_hit_rate() == pytest.approx(trace.infinite_cache_hit_rate())
    arrivals = [request.arrival_s for request in repeated.requests]
    assert arrivals == sorted(arrivals)
    assert repeated.duration_s == pytest.approx(3 * trace.duration_s)
    assert repeated.first(30).requests == trace.requests
    assert repeated.num_block_ids == 3 * trace.num_block_ids


@pytest.mark.parametrize("count", [0, 31])
def test_more_requests_than_there_are(make_trace: Callable[..., Trace], count: int) -> None:
    with pytest.raises(ConfigurationError, match="--num-requests: must be from 1 to the trace's 30"):
        make_trace(random.Random(0), 30).first(count)


def test_drawn_prefixes_keep_lengths_and_share_a_like_part(make_trace: Callable[..., Trace]) -> None:
    source = make_trace(random.Random(1), 200)
    rng = random.Random(2)
    requests = [TraceRequest(float(number), rng.randint(2000, 3000), 5) for number in range(400)]
    drawn = Trace("lengths", 16, tuple(requests)).with_prefixes_of(source)
    assert [(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in drawn.requests] == [
        (r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in requests
    ]
    assert drawn.block_size % 16 == 0
    assert all((len(r.block_ids) - 1) * drawn.block_size < r.num_prompt_tokens for r in drawn.requests)
    assert (
        0.5 * source.infinite_cache_hit_rate()
        < drawn.infinite_cache_hit_rate()
        < 1.5 * source.infinite_cache_hit_rate()
    )


def test_prefixes_of_a_trace_without_any(write: Callable[..., Path]) -> None:
    azure = read_trace(write(AZURE))
    with pytest.raises(ConfigurationError, match=r"--prefixes: trace\.jsonl has no prefixes to draw"):
        azure.with_prefixes_of(azure)
