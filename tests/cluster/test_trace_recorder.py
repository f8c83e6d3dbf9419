"""``--record-trace``: what a gateway writes down is what ``octavo simulate`` reads."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx2
import orjson
import pytest
from one_model import one_model
from scripted_cluster import HASHER, Cluster, deltas_of, request, rest, take

from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.service import ServedModel
from octavo.cluster.api.text.processor import TextProcessor
from octavo.cluster.trace_recorder import MOST_WAITING_BYTES, TraceRecorder
from octavo.router.simulator.trace_files import read_trace
from octavo.router.simulator.traces import TraceError
from octavo.worker.admission import Refusal
from octavo.worker.errors import ConfigurationError
from octavo.worker.messages import FinishReason, Request, SamplingParams
from octavo.worker.routing_hash import pack_hashes, unpack_hashes

SECRET = b"of the application"


class Lost:
    def __init__(self) -> None:
        self.number = 0

    def __call__(self, number: int) -> None:
        self.number += number


@pytest.fixture
def lost() -> Lost:
    return Lost()


@pytest.fixture
def new_recorder(tmp_path: Path, lost: Lost) -> Callable[[], TraceRecorder]:
    """Recorders that begin at 100 s."""
    return lambda: TraceRecorder(tmp_path / "trace.jsonl", 16, secret=SECRET, clock=lambda: 100.0, on_lost=lost)


def of_tokens(*token_ids: int) -> Request:
    return Request("r", "g", "m", token_ids, pack_hashes(HASHER.hash_blocks(token_ids)), SamplingParams(5, seed=0))


def lines(path: Path) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


async def test_what_is_served_over_http_is_read_and_has_the_same_prefixes(
    tmp_path: Path, text: TextProcessor, info: ServedModel, lost: Lost
) -> None:
    """The first of two requests with one prompt ends last, and arrives first all the same."""
    clock = asyncio.get_running_loop().time
    recorder = TraceRecorder(tmp_path / "trace.jsonl", 16, secret=SECRET, clock=clock, on_lost=lost)
    cluster = Cluster(recorder)
    await cluster.service.groups.refresh()
    app = build_app(cluster.service, one_model(text, replace(info, name="m")))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://octavo") as client:
        answers = []
        for number, prompt in enumerate(([500] * 40, [500] * 32 + [7] * 20), start=1):
            body = {"model": "m", "prompt": prompt, "max_tokens": 9}
            answers.append(asyncio.ensure_future(client.post("/v1/completions", json=body)))
            while len(cluster.a.requests) < number:
                await asyncio.sleep(0.001)
        await cluster.a.give(0, 0, (500, 501, 502), FinishReason.LENGTH)
        assert (await answers[1]).status_code == 200
        cluster.a.requests.pop()
        await cluster.a.give(0, 0, (500, 501), FinishReason.LENGTH)
        assert (await answers[0]).status_code == 200
    recorder.close()
    trace = read_trace(tmp_path / "trace.jsonl")
    first, second = trace.requests
    assert trace.block_size == 16
    assert (first.num_prompt_tokens, first.num_output_tokens, first.block_ids) == (40, 2, (0, 1))
    assert (second.num_prompt_tokens, second.num_output_tokens, second.block_ids) == (52, 3, (0, 1, 2))
    assert 0.0 <= first.arrival_s < second.arrival_s
    assert lost.number == 0


async def test_every_end_is_recorded_once(tmp_path: Path, new_recorder: Callable[[], TraceRecorder]) -> None:
    """Ended by the engine, by a stop string, by the client, by the loss of all groups; not what was never placed."""
    recorder = new_recorder()
    cluster = Cluster(recorder)
    await cluster.service.groups.refresh()

    under_way = await cluster.service.start(request(2))
    await cluster.a.give(0, 0, (1, 2, 3), FinishReason.STOP)
    await cluster.a.give(1, 0, (1,), FinishReason.STOP)
    await rest(deltas_of(under_way))
    under_way.abort()

    under_way = await cluster.service.start(request())
    await cluster.a.give(0, 0, (1, 2))
    await take(deltas_of(under_way), 1)
    under_way.end(0)
    under_way.abort()

    (await cluster.service.start(request())).abort()

    cluster.a.refusal = cluster.b.refusal = Refusal("full", 1.0)
    with pytest.raises(Exception, match="full"):
        await cluster.service.start(request())
    recorder.close()
    entries = lines(tmp_path / "trace.jsonl")[1:]
    assert [(entry["num_outputs"], entry["num_output_tokens"]) for entry in entries] == [(2, 3), (1, 2), (1, 1)]


def test_a_line_holds_times_lengths_and_hashes_and_nothing_else(
    tmp_path: Path, new_recorder: Callable[[], TraceRecorder]
) -> None:
    recorder = new_recorder()
    asked = of_tokens(*range(35))
    recorder.add(asked, 100.25, 1, 7)
    recorder.close()
    head, entry = lines(tmp_path / "trace.jsonl")
    assert (head["octavo_trace"], head["block_size"], set(head)) == (
        1,
        16,
        {"octavo_trace", "block_size", "started_unix_s"},
    )
    hashes = entry.pop("hashes")
    assert len(set(hashes)) == 2
    assert not set(hashes) & set(unpack_hashes(asked.routing_hashes).tolist())
    assert entry == {
        "arrival_s": 0.25,
        "num_prompt_tokens": 35,
        "num_output_tokens": 7,
        "num_outputs": 1,
    }


def test_recordings_never_touch_each_other_and_are_read_together(
    tmp_path: Path, new_recorder: Callable[[], TraceRecorder]
) -> None:
    for number, tokens in enumerate((range(40), range(16)), start=1):
        recorder = new_recorder()
        recorder.add(of_tokens(*tokens), 100.0 + 1000.0 * (2 - number), 1, number)
        recorder.close()
    both = tmp_path / "both.jsonl"
    both.write_bytes((tmp_path / "trace.jsonl").read_bytes() + (tmp_path / "trace-2.jsonl").read_bytes())
    trace = read_trace(both)
    assert [(request.num_output_tokens, request.block_ids) for request in trace.requests] == [(2, (0,)), (1, (0, 1))]
    assert trace.requests[0].arrival_s < 10.0
    assert trace.requests[1].arrival_s == pytest.approx(1000.0)
    both.write_bytes(both.read_bytes() + b'{"octavo_trace": 1, "block_size": 32}\n')
    with pytest.raises(TraceError, match="line 5: its block_size is 32, that of the recording above it 16"):
        read_trace(both)


def test_a_full_disk_leaves_whole_lines_and_is_counted(
    tmp_path: Path, lost: Lost, new_recorder: Callable[[], TraceRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, write, room = new_recorder(), os.write, [10]

    def write_until_full(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        num, room[0] = min(room[0], len(data)), max(0, room[0] - len(data))
        return write(file, data[:num])

    monkeypatch.setattr(os, "write", write_until_full)
    recorder.add(of_tokens(*range(35)), 100.0, 1, 1)
    recorder._write_requests(recorder._take())
    assert (lost.number, len(lines(tmp_path / "trace.jsonl"))) == (1, 1)
    room[0] = 10_000
    recorder.add(of_tokens(*range(35)), 101.0, 1, 2)
    recorder.close()
    assert [entry["num_output_tokens"] for entry in lines(tmp_path / "trace.jsonl")[1:]] == [2]


def test_what_cannot_be_written_in_time_is_dropped_and_counted(
    lost: Lost, new_recorder: Callable[[], TraceRecorder]
) -> None:
    recorder = new_recorder()
    large = replace(of_tokens(1), routing_hashes=bytes(MOST_WAITING_BYTES // 2))
    for _ in range(3):
        recorder.add(large, 100.0, 1, 1)
    assert (len(recorder._take()), lost.number) == (2, 1)
    recorder.close()


@pytest.mark.parametrize(
    ("path", "problem"), [("missing/t.jsonl", "the folder .*missing does not exist"), ("", "is a")]
)
def test_a_place_where_no_file_can_be_is_refused(tmp_path: Path, lost: Lost, path: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--record-trace: .*{problem}"):
        TraceRecorder(tmp_path / path, 16, secret=SECRET, clock=lambda: 0.0, on_lost=lost)
