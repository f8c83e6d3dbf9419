"""Readers of trace files, plain or compressed with gzip: all of a file is read and judged before anything is simulated.

Mooncake (github.com/kvcache-ai/Mooncake, FAST '25), JSON lines::

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …, 2354]}

``timestamp`` in ms. Each of ``hash_ids`` stands for 512 tokens and everything before them, the last for what is left.

Azure (github.com/Azure/AzurePublicDataset, "LLM inference 2023"), CSV: no prefixes are known::

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:17:03.9799600,4808,10

Our own, JSON lines; the first names the version, the tokens of a block, and when the recording began::

    {"octavo_trace": 1, "block_size": 16, "started_unix_s": 1789000000.5}
    {"arrival_s": 0.25, "num_prompt_tokens": 40, "num_output_tokens": 7, "hashes": [17, 4711]}

``arrival_s`` counts from the start of the recording. A request is written down when it is over, so the lines are in
any order of arrival. ``hashes`` stand for the prefixes that end with the prompt's full blocks, as whole numbers:
num_prompt_tokens // block_size of them, or none. Several recordings of one cluster may follow each other in a file,
each with its first line, put together by ``cat``; ``started_unix_s``, which one alone can do without, then says when
each began. Further fields of a line are for later versions of this reader's readers and are passed over.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import orjson

from ...worker.errors import ConfigurationError
from .traces import Trace, TraceBuilder, TraceError, require_fields, seconds_of

MOONCAKE_BLOCK_SIZE = 512
AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
RECORDED_VERSION = 1
VERSION_FIELD = "octavo_trace"
_RECORDED = ("arrival_s", "num_prompt_tokens", "num_output_tokens", "hashes")
_MOST_BLOCK_SIZE = 65_536
_AZURE_BLOCK_SIZE = 16
"""Of no meaning where there are no blocks."""


def read_trace(path: Path) -> Trace:
    """The trace in ``path``, whichever of the three forms it has.

    Raises TraceError for its contents, ConfigurationError when there is no such file.
    """
    lines = _lines(path)
    number, first = next(lines, (1, ""))
    if first.startswith(AZURE_HEADER[0]):
        return _read_azure(path, first, lines)
    head = _json(path, number, first)
    if isinstance(head, dict) and VERSION_FIELD in head:
        return _read_recorded(path, number, head, lines)
    return _read_mooncake(path, itertools.chain([(number, first)], lines))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of every line that is not empty."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if text := line.decode().strip():
                    yield number, text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(path, number + 1, f"the compressed file is damaged or cut off ({error})") from error
    except UnicodeDecodeError as error:
        raise TraceError(path, number, "the text is not UTF-8") from error
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from error


def _json(path: Path, line: int, text: str) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise TraceError(path, line, f"not JSON, or cut off ({error})") from error


def _read_mooncake(path: Path, lines: Iterator[tuple[int, str]]) -> Trace:
    builder = TraceBuilder(path, MOONCAKE_BLOCK_SIZE)
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    number = 0
    for number, text in lines:
        timestamp, num_prompt, num_output, blocks = _values(path, number, text, names)
        builder.add(number, _per_thousand(timestamp), num_prompt, num_output, blocks)
        _require_blocks(path, number, num_prompt, blocks, MOONCAKE_BLOCK_SIZE, rounded_up=True)
    return builder.build(number)


def _read_recorded(path: Path, number: int, head: dict[str, object], lines: Iterator[tuple[int, str]]) -> Trace:
    block_size, first_s = _recording(path, number, head)
    offset_s = earliest_s = 0.0  # starts of this recording and of the earliest one, after that of the file's first
    requests: list[tuple[float, int, list[object]]] = []
    for number, text in lines:
        fields = _json(path, number, text)
        if isinstance(fields, dict) and VERSION_FIELD in fields:  # ``cat`` has put another one here
            offset_s = _recording(path, number, fields, known_block_size=block_size)[1] - first_s
            earliest_s = min(earliest_s, offset_s)
            continue
        arrival_s, *values = [require_fields(path, number, fields, _RECORDED)[name] for name in _RECORDED]
        if (seconds := seconds_of(arrival_s)) is None:
            raise TraceError(path, number, f"the arrival must be a time ≥ 0, got {arrival_s!r}")
        requests.append((offset_s + seconds, number, values))
    builder = TraceBuilder(path, block_size)
    for time_s, line, (num_prompt, num_output, blocks) in sorted(requests, key=lambda request: request[:2]):
        builder.add(line, time_s - earliest_s, num_prompt, num_output, blocks)
        if blocks:
            _require_blocks(path, line, num_prompt, blocks, block_size, rounded_up=False)
    return builder.build(number)


def _recording(
    path: Path, number: int, head: dict[str, object], known_block_size: int | None = None
) -> tuple[int, float]:
    """A recording's tokens of a block, and when it began."""
    if head[VERSION_FIELD] != RECORDED_VERSION:
        problem = f"version {head[VERSION_FIELD]!r} is not known; this reads version {RECORDED_VERSION}"
        raise TraceError(path, number, problem)
    block_size = head.get("block_size")
    if type(block_size) is not int or not 1 <= block_size <= _MOST_BLOCK_SIZE:
        raise TraceError(path, number, f"block_size must be from 1 to {_MOST_BLOCK_SIZE}, got {block_size!r}")
    if known_block_size not in (None, block_size):
        problem = f"its block_size is {block_size}, that of the recording above it {known_block_size}"
        raise TraceError(path, number, problem)
    if (started_s := seconds_of(head.get("started_unix_s", 0.0))) is None:
        raise TraceError(path, number, f"started_unix_s must be a time ≥ 0, got {head['started_unix_s']!r}")
    return block_size, started_s


def _read_azure(path: Path, header: str, lines: Iterator[tuple[int, str]]) -> Trace:
    if tuple(header.split(",")) != AZURE_HEADER:
        raise TraceError(path, 1, f"the columns must be {','.join(AZURE_HEADER)}, got {header}")
    builder = TraceBuilder(path, _AZURE_BLOCK_SIZE)
    number = 1
    start: datetime | None = None
    for number, text in lines:
        cells = text.split(",")
        if len(cells) != len(AZURE_HEADER):
            raise TraceError(path, number, f"{len(AZURE_HEADER)} columns are expected, got {len(cells)}")
        time = _time(path, number, cells[0])
        start = start or time
        builder.add(number, (time - start).total_seconds(), *[_whole(cell) for cell in cells[1:]])
    return builder.build(number)


def _values(path: Path, line: int, text: str, names: tuple[str, ...]) -> list[object]:
    fields = require_fields(path, line, _json(path, line, text), names)
    return [fields[name] for name in names]


def _require_blocks(path: Path, line: int, tokens: object, blocks: object, size: int, *, rounded_up: bool) -> None:
    """The builder has judged the types."""
    if isinstance(tokens, int) and isinstance(blocks, list):
        num_blocks = -(-tokens // size) if rounded_up else tokens // size
        if len(blocks) != num_blocks:
            raise TraceError(
                path, line, f"{tokens} prompt tokens are {num_blocks} blocks of {size}, but {len(blocks)} are given"
            )


def _per_thousand(value: object) -> object:
    """A number of ms in seconds; anything else as it is, which is then refused by name."""
    return value / 1000 if isinstance(value, int | float) and not isinstance(value, bool) else value


def _time(path: Path, line: int, text: str) -> datetime:
    """Its fraction of a second may have more digits than a datetime can hold."""
    seconds, _, fraction = text.partition(".")
    try:
        return datetime.fromisoformat(f"{seconds}.{fraction[:6]:0<6}")
    except ValueError as error:
        raise TraceError(path, line, f"{text!r} is not a time") from error


def _whole(text: str) -> object:
    """A whole number where it is one; the text else, which is then refused by name."""
    return int(text) if text.isascii() and text.isdigit() else text
