"""Result: all repeats of a load with its conditions; what ``--json`` writes and ``octavo bench compare`` reads."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from ...worker.errors import ConfigurationError
from .figures import figures, flat
from .sample import Run
from .slo import Slo

_VERSION_FIELD, _VERSION = "octavo_load", 1


class Spread(NamedTuple):
    """Of one figure over repeats."""

    mean: float
    deviation: float | None
    """Sample standard deviation; None where there is one repeat."""


@dataclass(frozen=True, slots=True)
class Result:
    """``runs`` has one or more."""

    title: str
    conditions: Mapping[str, Any]
    slo: Slo | None
    runs: tuple[Run, ...]

    def figures(self) -> list[dict[str, Any]]:
        """Of each repeat."""
        return [figures(run, self.slo) for run in self.runs]

    def spreads(self) -> dict[str, Spread]:
        """Of all figures that every repeat has."""
        return spreads([flat(values) for values in self.figures()])

    def to_json(self) -> bytes:
        limits = None if self.slo is None else map(_limit_to_json, (self.slo.ttft_s, self.slo.tpot_s, self.slo.e2e_s))
        value = {
            _VERSION_FIELD: _VERSION,
            "title": self.title,
            "conditions": self.conditions,
            "slo_s": limits and list(limits),
            "figures": {name: spread._asdict() for name, spread in self.spreads().items()},
            "repeats": self.figures(),
            "runs": [run.to_json() for run in self.runs],
        }
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY, default=str)


def _limit_to_json(limit_s: float) -> float | None:
    """JSON has no infinity."""
    return None if math.isinf(limit_s) else limit_s


def _limit(value: float | None) -> float:
    return math.inf if value is None else float(value)


def spreads(repeats: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """``repeats``: flat figures; those that each of them has."""
    names = [name for name in repeats[0] if all(name in values for values in repeats)]
    return {name: _spread([values[name] for values in repeats]) for name in names}


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def read_result(path: Path) -> Result:
    """Raises ConfigurationError."""
    try:
        value = orjson.loads(path.read_bytes())
        if value[_VERSION_FIELD] != _VERSION:
            raise ConfigurationError(f"{path}: version {value[_VERSION_FIELD]!r} is not known; this reads {_VERSION}")
        limits: list[float | None] | None = value["slo_s"]
        slo = None if limits is None else Slo(*map(_limit, limits))
        runs = tuple([Run.from_json(run) for run in value["runs"]])
        result = Result(str(value["title"]), dict(value["conditions"]), slo, runs)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigurationError(f"{path}: not written by octavo bench serve --json ({error!r:.200})") from error
    if not result.runs:
        raise ConfigurationError(f"{path}: holds no run")
    return result
