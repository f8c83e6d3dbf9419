"""A trace: when requests came, how long they were, and which beginnings they had in common. No text, no tokens.

A request names its prompt by *block ids*: each stands for ``trace.block_size`` tokens together with all that is before
them, so that two prompts begin alike as far as their ids do. The last id may stand for fewer tokens than a block, and
what no id stands for is like nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from ...worker.errors import ConfigurationError

MOST_TOKENS = 10_000_000
"""Of one prompt or output; more is taken for a mistake in the file."""


class TraceError(ConfigurationError):
    """A trace that cannot be read; names file and line."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{path}, line {line}: {problem}")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    """Since the start of the trace."""
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    """Counted from 0, in the order in which they first appear."""


@dataclass(frozen=True, slots=True)
class Trace:
    """``requests`` in the order of their arrival; there is at least one."""

    name: str
    block_size: int
    """Tokens that a block id stands for."""
    requests: tuple[TraceRequest, ...]

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last, and the mean time between two."""
        between_s = self.requests[-1].arrival_s - self.requests[0].arrival_s
        return between_s * len(self.requests) / max(1, len(self.requests) - 1)

    @property
    def num_block_ids(self) -> int:
        return 1 + max((max(request.block_ids) for request in self.requests if request.block_ids), default=-1)

    def faster(self, speed: float) -> Trace:
        """Time compressed ``speed`` times, arrivals from 0 on. Raises ConfigurationError unless it is above 0."""
        if not 0.0 < speed < math.inf:
            raise ConfigurationError(f"--speed: must be a number above 0, got {speed}")
        first_s = self.requests[0].arrival_s
        requests = (replace(request, arrival_s=(request.arrival_s - first_s) / speed) for request in self.requests)
        return replace(self, requests=tuple(requests))

    def first(self, num_requests: int) -> Trace:
        """Only the first ``num_requests``. Raises ConfigurationError when there are not so many."""
        if not 1 <= num_requests <= len(self.requests):
            raise ConfigurationError(
                f"--num-requests: must be from 1 to the trace's {len(self.requests)}, got {num_requests}"
            )
        return replace(self, requests=self.requests[:num_requests])

    def repeated(self, times: int) -> Trace:
        """The trace ``times`` over, one after the other. Each time its prompts are new ones: a repetition finds nothing
        of the one before in a cache, and the share of a prompt that could be reused stays what it was.

        Raises ConfigurationError unless ``times`` is 1 or more.
        """
        if times < 1:
            raise ConfigurationError(f"--repeat: must be at least 1, got {times}")
        if times == 1:
            return self
        duration_s, num_ids = self.duration_s, self.num_block_ids
        requests = [
            replace(
                request,
                arrival_s=request.arrival_s + number * duration_s,
                block_ids=tuple([block_id + number * num_ids for block_id in request.block_ids]),
            )
            for number in range(times)
            for request in self.requests
        ]
        return replace(self, requests=tuple(requests))

    def with_prefixes_of(self, other: Trace) -> Trace:
        """Arrivals and lengths of this trace, and what prompts have in common from ``other``.

        The i-th request here gets the block ids of the i-th there, so that who shares with whom, and how long after
        each other they come in the count of requests, is as there; ``other`` is repeated (with new ids) as often as it
        takes. An id stands for as many tokens as makes the mean prompts of both equally many ids long, in multiples of
        16: a prompt shares about the same part of itself as there. One that is shorter than its ids loses the last
        ones, and of one that is longer the rest is its own. Raises ConfigurationError when ``other`` has no ids.
        """
        if not other.num_block_ids:
            raise ConfigurationError(f"--prefixes: {other.name} has no prefixes to draw")
        scale = Fraction(_num_prompt_tokens(self), len(self.requests)) / Fraction(
            _num_prompt_tokens(other), len(other.requests)
        )
        block_size = max(16, round(other.block_size * scale / 16) * 16)
        drawn = other.repeated(-(-len(self.requests) // len(other.requests))).requests
        requests = [
            replace(request, block_ids=source.block_ids[: -(-request.num_prompt_tokens // block_size)])
            for request, source in zip(self.requests, drawn, strict=False)
        ]
        return Trace(f"{self.name} with prefixes of {other.name}", block_size, tuple(requests))

    def infinite_cache_hit_rate(self) -> float:
        """Share of the prompts' blocks that came before, in any prompt: what a cache could have that never forgets.

        A prompt's tokens beyond its ids count as blocks that never came before.
        """
        known: set[int] = set()
        num_hit = num_all = 0
        for request in self.requests:
            num_hit += num_known(request.block_ids, known)
            num_all += max(len(request.block_ids), -(-request.num_prompt_tokens // self.block_size))
            known.update(request.block_ids)
        return num_hit / num_all


def num_known(block_ids: Sequence[int], known: set[int]) -> int:
    """How many of the first ids are ``known``."""
    return next((number for number, block_id in enumerate(block_ids) if block_id not in known), len(block_ids))


def _num_prompt_tokens(trace: Trace) -> int:
    return sum(request.num_prompt_tokens for request in trace.requests)


class TraceBuilder:
    """Judges requests one by one, as a reader finds them, and numbers their blocks anew."""

    def __init__(self, path: Path, block_size: int) -> None:
        self._path = path
        self._block_size = block_size
        self._requests: list[TraceRequest] = []
        self._ids: dict[int, int] = {}
        self._parents: dict[int, int | None] = {}
        """Block → the one before it."""

    def add(self, line: int, arrival_s: object, num_prompt: object, num_output: object, blocks: object = ()) -> None:
        """Raises TraceError when the values are impossible by themselves or after what came before."""
        last_s = self._requests[-1].arrival_s if self._requests else 0.0
        time_s = seconds_of(arrival_s)
        if time_s is None:
            raise TraceError(self._path, line, f"the arrival must be a time ≥ 0, got {arrival_s!r}")
        if time_s < last_s:
            raise TraceError(
                self._path, line, f"it arrives at {time_s:g} s, before the request above it ({last_s:g} s)"
            )
        prompt = self._count(line, "prompt tokens", num_prompt)
        output = self._count(line, "output tokens", num_output)
        self._requests.append(TraceRequest(time_s, prompt, output, self._number(line, blocks)))

    def build(self, line: int) -> Trace:
        """``line`` is the file's last one."""
        if not self._requests:
            raise TraceError(self._path, max(line, 1), "the trace holds no request")
        return Trace(self._path.name, self._block_size, tuple(self._requests))

    def _count(self, line: int, name: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_TOKENS:
            raise TraceError(self._path, line, f"{name} must be a number from 1 to {MOST_TOKENS}, got {value!r}")
        return value

    def _number(self, line: int, blocks: object) -> tuple[int, ...]:
        if not isinstance(blocks, list | tuple) or not all(type(block) is int for block in blocks):
            raise TraceError(self._path, line, f"the blocks must be a list of whole numbers, got {_shortened(blocks)}")
        parent: int | None = None
        for block in blocks:
            if self._parents.setdefault(block, parent) != parent:
                raise TraceError(self._path, line, f"block {block} follows another block than it did before")
            parent = block
        return tuple([self._ids.setdefault(block, len(self._ids)) for block in blocks])


def require_fields(path: Path, line: int, value: object, names: Iterable[str]) -> Mapping[str, object]:
    """``value`` as an object that has all of ``names``. Raises TraceError."""
    if not isinstance(value, dict):
        raise TraceError(path, line, f"a JSON object is expected, got {_shortened(value)}")
    missing = [name for name in names if name not in value]
    if missing:
        raise TraceError(path, line, f"{', '.join(missing)} missing")
    return value


def seconds_of(value: object) -> float | None:
    """``value`` if it is a time ≥ 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0.0 <= float(value) < math.inf else None  # type: ignore[arg-type]


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
