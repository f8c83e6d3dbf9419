"""When scripts arrive, in seconds since the start. Endless, but for what was recorded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

_BATCH = 1_024


def gamma_arrivals(rate_per_s: float, burstiness: float, rng: np.random.Generator) -> Iterator[float]:
    """Gaps from a gamma distribution of mean 1 / rate and shape ``burstiness``: 1 is a Poisson process, less comes in
    bursts, more is more even. Their coefficient of variation is 1 / sqrt(burstiness)."""
    now_s = 0.0
    while True:
        for gap_s in rng.gamma(burstiness, 1.0 / (rate_per_s * burstiness), _BATCH).tolist():
            now_s += gap_s
            yield now_s


def at_once() -> Iterator[float]:
    return itertools.repeat(0.0)
