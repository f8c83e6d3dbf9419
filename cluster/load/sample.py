"""Sample: what became of one request. Times are seconds since the start of its run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Latencies count from ``due_s``, when the request was to go out, and not from when it did: a server that stalls,
    or a client that is late, would otherwise hide the waiting that it causes (coordinated omission)."""

    script: int
    turn: int
    due_s: float
    free_s: float
    """When only this generator stood in its way: ``due_s``, or later where ``--max-concurrency`` held it back."""
    sent_s: float
    token_times_s: tuple[float, ...] = ()
    """When pieces of text came; the end, where there was none."""
    num_prompt_tokens: int | None = None
    """As the server counts them, like the next two; None where it does not say."""
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    group: str | None = None
    """The worker group that the server names."""
    error: str | None = None
    """Its kind, such as ``http 429``; None when the answer came whole."""
    message: str = ""

    @property
    def is_good(self) -> bool:
        return self.error is None

    @property
    def late_s(self) -> float:
        """The generator's own delay."""
        return self.sent_s - self.free_s

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.token_times_s[-1] - self.due_s

    @property
    def num_tokens(self) -> int:
        """Output tokens; pieces of text where the server does not count."""
        return len(self.token_times_s) if self.num_output_tokens is None else self.num_output_tokens

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; NaN where there is one only."""
        if self.num_tokens < 2:
            return math.nan
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_tokens - 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"token_times_s": [round(time_s, 6) for time_s in self.token_times_s]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Sample:
        """Raises KeyError and TypeError."""
        values = {field.name: value[field.name] for field in fields(cls)}
        return cls(**values | {"token_times_s": tuple(map(float, values["token_times_s"]))})


@dataclass(frozen=True, slots=True)
class Run:
    """One repeat."""

    samples: tuple[Sample, ...]
    """In the order of their ends."""
    num_unsent: int
    """Turns that were not sent, because a turn before them failed or the run was ended."""
    wall_s: float
    """From the start until the last answer."""
    cpu_s: float
    """That the generator spent in it."""

    def good(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.is_good]

    def to_json(self) -> dict[str, Any]:
        samples = [sample.to_json() for sample in self.samples]
        return {"num_unsent": self.num_unsent, "wall_s": self.wall_s, "cpu_s": self.cpu_s, "samples": samples}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Run:
        """Raises KeyError and TypeError."""
        samples = tuple([Sample.from_json(sample) for sample in value["samples"]])
        return cls(samples, int(value["num_unsent"]), float(value["wall_s"]), float(value["cpu_s"]))
