"""What counts as good: limits on a request's times."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ...worker.errors import ConfigurationError
from .sample import Sample

_TERM = re.compile(r"(?P<name>ttft|tpot|e2e)=(?P<number>\d+(\.\d*)?|\.\d+)(?P<unit>ms|s)?")
_UNITS = {"ms": 1e-3, "s": 1.0, None: 1.0}


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds; infinite where there is no limit. A request that failed is not good."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2e_s: float = math.inf

    def is_met_by(self, sample: Sample) -> bool:
        """A request with one token has no time between tokens."""
        if not sample.is_good:
            return False
        is_soon, is_over = sample.ttft_s <= self.ttft_s, sample.e2e_s <= self.e2e_s
        return is_soon and is_over and not sample.tpot_s > self.tpot_s


def parse_slo(text: str) -> Slo:
    """``ttft=500ms,tpot=0.05,e2e=10s``; seconds where no unit is said. Raises ConfigurationError."""
    limits: dict[str, float] = {}
    for term in text.replace(" ", "").split(","):
        match = _TERM.fullmatch(term)
        if match is None or float(match["number"]) == 0.0:
            raise ConfigurationError(
                f"--slo: terms such as ttft=500ms, tpot=0.05 or e2e=10s are expected, got {term!r}"
            )
        if f"{match['name']}_s" in limits:
            raise ConfigurationError(f"--slo: {match['name']} is said twice")
        limits[f"{match['name']}_s"] = float(match["number"]) * _UNITS[match["unit"]]
    return Slo(**limits)
