"""TraceRecorder: a gateway's requests in a file that ``octavo simulate`` reads.

A line for each request that a worker group took, when it is over: its arrival, lengths and routing hashes, and no text
and no token ids. Routing hashes are linear before their last step, so who knows some of a trace's prompts could find
their key and look for others; what is written is a keyed hash of each. Lines come in the order of the requests' ends;
the reader sorts them. ``router/simulator/trace_files.py`` has the form.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson

from ..router.simulator.trace_files import RECORDED_VERSION, VERSION_FIELD
from ..worker.errors import ConfigurationError
from ..worker.messages import Request

WRITE_PERIOD_S = 1.0
MOST_WAITING_BYTES = 64 * 2**20
"""Of hashes not yet written; what does not fit is not recorded."""

_Entry = tuple[float, int, int, int, bytes]
"""Arrival, tokens of the prompt and of the longest output, outputs, packed hashes."""

logger = logging.getLogger(__name__)


class TraceRecorder:
    """``secret`` is the application's; ``clock`` a steady one, in seconds; ``on_lost`` is told how many requests could
    not be recorded."""

    def __init__(
        self,
        path: Path,
        block_size: int,
        *,
        secret: bytes,
        clock: Callable[[], float],
        on_lost: Callable[[int], object],
    ) -> None:
        """Makes a new file, ``path`` with a number before its ending where that name is taken: by another gateway, or
        an earlier recording. Raises ConfigurationError."""
        check_trace_file(path)
        self.path, self._file = _new_file(path)
        self._on_lost = on_lost
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"octavo-trace").digest()
        self._start_s = clock()
        self._waiting: list[_Entry] = []
        self._num_waiting_bytes = 0
        self._writer = ThreadPoolExecutor(1, "trace")
        self._size = 0
        self._has_warned = False
        head = {VERSION_FIELD: RECORDED_VERSION, "block_size": block_size, "started_unix_s": time.time()}
        self._write(_line(head), 0)

    def add(self, request: Request, arrival_s: float, num_outputs: int, num_output_tokens: int) -> None:
        """A request is over. ``num_output_tokens`` of its longest output; at least 1 is recorded. Never blocks."""
        hashes = request.routing_hashes
        if self._num_waiting_bytes + len(hashes) > MOST_WAITING_BYTES:
            self._on_lost(1)
            return
        self._num_waiting_bytes += len(hashes)
        num_prompt_tokens = len(request.prompt_token_ids)
        self._waiting.append((arrival_s, num_prompt_tokens, max(1, num_output_tokens), num_outputs, hashes))

    async def run(self) -> None:
        """Write what has come, once a second, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(WRITE_PERIOD_S)
            await loop.run_in_executor(self._writer, self._write_requests, self._take())

    def close(self) -> None:
        """Write the last ones. ``run`` must have ended."""
        self._writer.submit(self._write_requests, self._take())
        self._writer.shutdown()
        os.close(self._file)

    def _take(self) -> list[_Entry]:
        taken, self._waiting = self._waiting, []
        self._num_waiting_bytes = 0
        return taken

    def _write_requests(self, entries: list[_Entry]) -> None:
        self._write(b"".join(map(self._request_line, entries)), len(entries))

    def _request_line(self, entry: _Entry) -> bytes:
        arrival_s, num_prompt_tokens, num_output_tokens, num_outputs, hashes = entry
        return _line(
            {
                "arrival_s": round(max(0.0, arrival_s - self._start_s), 6),
                "num_prompt_tokens": num_prompt_tokens,
                "num_output_tokens": num_output_tokens,
                "num_outputs": num_outputs,
                "hashes": [self._disguise(hashes[first : first + 8]) for first in range(0, len(hashes), 8)],
            }
        )

    def _disguise(self, packed_hash: bytes) -> int:
        """About 1 µs."""
        return int.from_bytes(hashlib.blake2b(packed_hash, digest_size=8, key=self._key).digest(), "little")

    def _write(self, lines: bytes, num_requests: int) -> None:
        """All of ``lines`` or nothing: a full disk must fail no request, and leave no half of a line."""
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
            self._size += len(lines)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            self._on_lost(num_requests)
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("--record-trace: requests are missing in %s from now on: %s", self.path, error.strerror)


def check_trace_file(path: Path) -> None:
    """Raises ConfigurationError where no file can be made at ``path``."""
    folder = path.parent
    if not folder.is_dir():
        problem = f"the folder {folder} does not exist"
    elif path.is_dir():
        problem = f"{path} is a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = f"the folder {folder} cannot be written to"
    else:
        return
    raise ConfigurationError(f"--record-trace: {problem}")


def _new_file(path: Path) -> tuple[Path, int]:
    """The first of ``trace.jsonl``, ``trace-2.jsonl``, … that nobody has."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
    for number in itertools.count(1):
        name = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        try:
            return name, os.open(name, flags, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigurationError(f"--record-trace: {name} cannot be made: {error.strerror or error}") from error
    raise AssertionError("numbers do not end")


def _line(fields: Mapping[str, object]) -> bytes:
    return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
